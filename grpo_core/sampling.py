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
from transformers import DynamicCache

from grpo_core.models import BaseModel
from grpo_core.packing import PADDING, PROMPT, attention_masks
from grpo_core.policies.adapters import AdapterBatch, applied


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


class Sampler(Protocol):
    """An engine that samples groups of completions."""

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        adapters: AdapterBatch,
        settings: SamplingSettings,
        uniforms: np.ndarray,
        between_tokens: Callable[[], None] = ...,
    ) -> list[list[Completion]]:
        """One group per prompt.

        Args:
            prompts: token ids; adapters: one for all prompts or one for each.
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

    @torch.no_grad()
    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        adapters: AdapterBatch,
        settings: SamplingSettings,
        uniforms: np.ndarray,
        between_tokens: Callable[[], None] = lambda: None,
    ) -> list[list[Completion]]:
        """See `Sampler.sample`."""
        group = uniforms.shape[1]
        device = self._base.device
        owner = torch.arange(len(prompts), device=device)
        with applied(self._base.model, adapters, owner):
            cache, logits, positions, segments = self._prefill(prompts)
        cache.batch_repeat_interleave(group)
        logits, positions, segments = (t.repeat_interleave(group, dim=0) for t in (logits, positions, segments))
        owner = owner.repeat_interleave(group)
        next_position = torch.tensor([len(p) for p in prompts], device=device).repeat_interleave(group)

        completions = [Completion() for _ in range(len(prompts) * group)]
        alive = list(range(len(completions)))
        draws = uniforms.reshape(len(completions), -1)
        for number in range(settings.max_new_tokens):
            between_tokens()
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
                kept = torch.tensor(keep, device=device)
                cache.batch_select_indices(kept)
                positions, segments, owner = positions[kept], segments[kept], owner[kept]
                next_position, tokens = next_position[kept], tokens[kept]
                alive = [alive[place] for place in keep]
            positions = torch.cat([positions, next_position[:, None]], dim=1)
            segments = torch.cat([segments, torch.full_like(next_position[:, None], PROMPT + 1)], dim=1)
            with applied(self._base.model, adapters, owner):
                logits = self._forward(tokens[:, None], positions, segments, cache)[:, -1]
            next_position = next_position + 1
        return [completions[start : start + group] for start in range(0, len(completions), group)]

    def _prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[DynamicCache, Tensor, Tensor, Tensor]:
        device = self._base.device
        length = max(len(prompt) for prompt in prompts)
        ids = torch.tensor([[*p, *[0] * (length - len(p))] for p in prompts], device=device)
        positions = torch.arange(length, device=device).expand(len(prompts), -1)
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        segments = torch.where(positions < lengths[:, None], PROMPT, PADDING)
        # A plain dynamic cache keeps every key: the sliding window is in the mask, where it counts positions.
        cache = DynamicCache()
        hidden = self._hidden(ids, positions, segments, cache)
        last = hidden[torch.arange(len(prompts), device=device), lengths - 1]
        return cache, self._base.lm_head(last), positions, segments

    def _forward(self, ids: Tensor, positions: Tensor, segments: Tensor, cache: DynamicCache) -> Tensor:
        return self._base.lm_head(self._hidden(ids, positions, segments, cache))

    def _hidden(self, ids: Tensor, positions: Tensor, segments: Tensor, cache: DynamicCache) -> Tensor:
        """Hidden states of the newest ``ids.shape[1]`` tokens; positions and segments cover the cache as well."""
        new = ids.shape[1]
        masks = attention_masks(self._base.model, positions[:, -new:], segments[:, -new:], positions, segments)
        return self._base.decoder(
            input_ids=ids, attention_mask=masks, position_ids=positions[:, -new:], cache=cache, use_cache=True
        ).last_hidden_state


def _draw(logits: Tensor, temperature: float, uniforms: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
    """One token per row by inverting the cumulative distribution at `uniforms`, or the likeliest one.

    Returns:
        tokens ``int[rows]``, their log-probabilities ``float[rows]`` and entropies ``float[rows]``.
    """
    logprobs = torch.log_softmax(logits.float() / (temperature or 1.0), dim=-1)
    probabilities = logprobs.exp()
    entropies = -(probabilities * logprobs).sum(-1)
    if temperature == 0:
        tokens = logits.argmax(-1)
        return tokens, torch.zeros_like(entropies), entropies
    # Metal has no fp64, and fp32 sums over a vocabulary are off by more than the tail's probabilities.
    place = torch.device("cpu") if logits.device.type == "mps" else logits.device
    cumulative = probabilities.to(place, torch.float64).cumsum(-1)
    points = torch.from_numpy(uniforms).to(place)[:, None] * cumulative[:, -1:]
    # right=True: a point on a boundary belongs to the token above it, so no token of probability 0 is drawn
    tokens = torch.searchsorted(cumulative, points, right=True).squeeze(1).clamp(max=logits.shape[-1] - 1)
    tokens = tokens.to(logits.device)
    return tokens, logprobs.gather(1, tokens[:, None]).squeeze(1), entropies
