"""Log-probabilities of completion tokens under a model with adapters.

Only completion tokens pass through the LM head, in chunks, and never again in the backward pass: the
gradient of a token's log-probability is a vector times one number, and the vector is computed with the value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from grpo_core.engines.base import Prefill
from grpo_core.models import BaseModel
from grpo_core.packing import Group

_CHUNK = 256
"""Tokens per pass through the LM head: 25 MB of bf16 logits at a vocabulary of 49,152."""

_SLICE = 32
"""Tokens whose logits are fp32 at one time: few enough to stay in the processor's cache."""


def token_logprobs(
    base: BaseModel, groups: Sequence[Group], temperature: float = 1.0, prefill: Prefill | None = None
) -> Tensor:
    """Log-probability of every completion token, at a temperature.

    Adapters are those applied to the base model at the moment (`policies.adapters.applied`), under which `prefill`
    must have been computed, if given.

    Returns:
        ``float32[tokens]`` in order group, completion, token (fp64 for an fp64 model); differentiable.
    """
    targets = [token for _, completions in groups for completion in completions for token in completion]
    hidden = base.engine.predicting(groups, prefill)
    return _ChunkedLogProbs.apply(  # type: ignore[no-any-return]
        hidden, base.lm_head.weight, torch.tensor(targets, dtype=torch.long, device=base.device), temperature
    )


class _ChunkedLogProbs(torch.autograd.Function):
    """log softmax(h W^T / T)[target], with gradients for h alone (the LM head is frozen)."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> Tensor:
        """``hidden[tokens, d_model]``, ``weight[vocabulary, d_model]``, ``targets[tokens]`` -> ``[tokens]``."""
        logprobs, slopes = [], []
        for h, target in zip(hidden.split(_CHUNK), targets.split(_CHUNK), strict=True):
            logits = h @ weight.T
            totals = []
            for part, chosen in zip(logits.split(_SLICE), target.split(_SLICE), strict=True):
                shifted = part.to(torch.promote_types(part.dtype, torch.float32)) / temperature
                shifted -= shifted.amax(-1, keepdim=True)
                one = shifted.gather(1, chosen[:, None])
                part.copy_(shifted.exp_())
                totals.append(shifted.sum(-1, keepdim=True))
                logprobs.append((one - totals[-1].log()).squeeze(1))
            if ctx.needs_input_grad[0]:
                # d logp[target] / d h = (W[target] - sum of p W) / T; logits hold p times its row's total by now
                mean = (logits @ weight) / torch.cat(totals)
                slopes.append(((weight[target] - mean) / temperature).to(hidden.dtype))
        if slopes:
            ctx.save_for_backward(torch.cat(slopes))
        return torch.cat(logprobs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        """One number a token times the slope that forward kept."""
        (slopes,) = ctx.saved_tensors
        return (slopes * gradients[0][:, None]).to(slopes.dtype), None, None, None
