"""Groups of completions from a model with adapters.

Prompts are prefilled once each; their keys and values are then shared out to the group, and all
groups decode in one batch from which finished rows are dropped. Random numbers are addressed, not
consumed: a completion's n-th uniform depends on its address alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from grpo_core.engines.base import Prefill
from grpo_core.engines.packed_weights import packed_linear
from grpo_core.models import BaseModel
from grpo_core.policies.adapters import AdapterBatch


@dataclass
class Completion:
    """One sampled completion.

    Attributes:
        ids: tokens, the stop token included when there is one.
        logprobs: log-probability of each token at the sampling temperature (0 when greedy), as decoding saw it.
        entropies: entropy in nats of the distribution each token was drawn from.
        truncated: whether the budget ended before a stop token came.
    """

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    truncated: bool = True


@dataclass(frozen=True)
class SamplingSettings:
    """How to decode. `temperature` 0 is greedy; `stop_ids` end a completion."""

    max_new_tokens: int
    temperature: float
    stop_ids: frozenset[int]


@dataclass(frozen=True)
class Samples:
    """Groups of completions, one group per prompt.

    Attributes:
        prefill: the prompts as the sampler's engine computed them, for whoever computes them next under the same
            adapters; None from a sampler with an engine of its own.
    """

    groups: list[list[Completion]]
    prefill: Prefill | None


class Sampler(Protocol):
    """An engine that samples groups of completions."""

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        adapters: AdapterBatch,
        settings: SamplingSettings,
        uniforms: np.ndarray,
        between_tokens: Callable[[], None] = ...,
    ) -> Samples:
        """One group per prompt.

        Args:
            prompts: token ids.
            adapters: one for all prompts or one for each. Where they are leaves that require gradients, a sampler
                that trains too computes the prompts differentiably.
            uniforms: ``float64[prompts, group, max_new_tokens]`` in [0, 1).
            between_tokens: called before every decode step; may raise to leave.
        """
        ...


def addressed_uniforms(seed: int, step: int, prompt: int, attempt: int, group: int, tokens: int) -> np.ndarray:
    """``float64[group, tokens]`` uniforms of one group, from their address alone.

    Philox is counter-based: completion k draws from its own counter range, whose first numbers do not
    depend on how many are taken.
    """
    rows = []
    for completion in range(group):
        counter = np.array([0, completion, prompt, step], dtype=np.uint64)
        key = np.array([seed, attempt], dtype=np.uint64)
        rows.append(np.random.Generator(np.random.Philox(counter=counter, key=key)).random(tokens))
    return np.stack(rows)


class TorchSampler:
    """Samples with the same torch model that trains."""

    def __init__(self, base: BaseModel):
        self._base = base
        self._lm_head = packed_linear(base.lm_head.weight.detach())

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        adapters: AdapterBatch,
        settings: SamplingSettings,
        uniforms: np.ndarray,
        between_tokens: Callable[[], None] = lambda: None,
    ) -> Samples:
        """See `Sampler.sample`."""
        with torch.set_grad_enabled(adapters.requires_grad):
            prefill = self._base.engine.prefill(prompts, adapters)
        return Samples(self._decode(prefill, settings, uniforms, between_tokens), prefill)

    @torch.no_grad()
    def _decode(
        self, prefill: Prefill, settings: SamplingSettings, uniforms: np.ndarray, between_tokens: Callable[[], None]
    ) -> list[list[Completion]]:
        group = uniforms.shape[1]
        decoding = self._base.engine.decoding(prefill, group)
        completions = [Completion() for _ in range(len(prefill.prompts) * group)]
        alive = list(range(len(completions)))
        draws = uniforms.reshape(len(completions), -1)
        for number in range(settings.max_new_tokens):
            between_tokens()
            logits = self._lm_head(decoding.hidden)
            tokens, logprobs, entropies = _draw(logits, settings.temperature, draws[alive, number])
            keep = []
            drawn = zip(alive, tokens.tolist(), logprobs.tolist(), entropies.tolist(), strict=True)
            for place, (row, token, logprob, entropy) in enumerate(drawn):
                completion = completions[row]
                completion.ids.append(token)
                completion.logprobs.append(logprob)
                completion.entropies.append(entropy)
                completion.truncated = token not in settings.stop_ids
                if completion.truncated:
                    keep.append(place)
            if not keep or number + 1 == settings.max_new_tokens:
                break
            if len(keep) < len(alive):
                kept = torch.tensor(keep, device=tokens.device)
                decoding.keep(kept)
                tokens = tokens[kept]
                alive = [alive[place] for place in keep]
            decoding.step(tokens)
        return [completions[start : start + group] for start in range(0, len(completions), group)]


def _draw(logits: Tensor, temperature: float, uniforms: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
    """One token per row by inverting the cumulative distribution at `uniforms`, or the likeliest one.

    Returns:
        tokens ``int[rows]``, their log-probabilities ``float[rows]`` and entropies ``float[rows]``.
    """
    shifted = logits.float() / (temperature or 1.0)
    shifted -= shifted.amax(-1, keepdim=True)
    weights = shifted.exp()
    totals = weights.sum(-1)
    # entropy = log Z - sum of p * logit, with logits relative to the largest; 0 * -inf counts as 0
    entropies = totals.log() - torch.linalg.vecdot(weights, shifted.nan_to_num(neginf=0.0)) / totals
    if temperature == 0:
        return logits.argmax(-1), torch.zeros_like(entropies), entropies
    # Metal has no fp64, and fp32 sums over a vocabulary are off by more than the tail's probabilities.
    place = torch.device("cpu") if logits.device.type == "mps" else logits.device
    tokens = _invert(weights.to(place), torch.from_numpy(uniforms).to(place)).to(logits.device)
    return tokens, shifted.gather(1, tokens[:, None]).squeeze(1) - totals.log(), entropies


_STRIDE = 256
"""Tokens whose weights are summed first, so that only one such run a row is looked through in fp64."""


def _invert(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The token in whose share of the cumulative distribution each row's uniform falls.

    Args:
        weights: ``float[rows, vocabulary]``, not normalised. uniforms: ``float64[rows]`` in [0, 1).

    Returns:
        ``int[rows]``; a token of weight 0 is never drawn.
    """
    runs = torch.nn.functional.pad(weights, (0, -weights.shape[1] % _STRIDE)).view(len(weights), -1, _STRIDE)
    sums = runs.sum(-1).double().cumsum(-1)
    points = uniforms[:, None] * sums[:, -1:]
    # right=True: a point on a boundary belongs to what is above it, so nothing of weight 0 is drawn
    run = torch.searchsorted(sums, points, right=True)
    below = torch.where(run > 0, sums.gather(1, (run - 1).clamp(min=0)), 0.0)
    within = runs[torch.arange(len(runs), device=runs.device), run.squeeze(1)].double().cumsum(-1)
    # A run's fp32 sum can be a little more than its tokens' fp64 sum: the point stays below the latter.
    points = torch.minimum(points - below, within[:, -1:].nextafter(torch.zeros_like(below)))
    return (run * _STRIDE + torch.searchsorted(within, points, right=True)).squeeze(1)
