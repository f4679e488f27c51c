"""Log-probabilities of completion tokens under a model with adapters.

Only completion tokens pass through the LM head, in chunks, and the backward pass computes the chunk
again: a (tokens x vocabulary) tensor is never kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from grpo_core.models import BaseModel
from grpo_core.packing import PackedRows, attention_masks

_CHUNK = 1024
"""Tokens per pass through the LM head: 200 MB of fp32 logits at a vocabulary of 49,152."""


def token_logprobs(base: BaseModel, packed: PackedRows, temperature: float = 1.0) -> Tensor:
    """Log-probability of every completion token, at a temperature.

    Adapters are those applied to the base model at the moment (`policies.adapters.applied`).

    Returns:
        ``float32[tokens]`` in the order of ``packed.targets``, differentiable.
    """
    masks = attention_masks(base.model, packed.positions, packed.segments, packed.positions, packed.segments)
    hidden = base.decoder(
        input_ids=packed.input_ids, attention_mask=masks, position_ids=packed.positions, use_cache=False
    ).last_hidden_state
    predicting = hidden[packed.row, packed.source]
    return _ChunkedLogProbs.apply(predicting, base.lm_head.weight, packed.targets, temperature)  # type: ignore[no-any-return]


class _ChunkedLogProbs(torch.autograd.Function):
    """log softmax(h W^T / T)[target], with gradients for h alone (the LM head is frozen)."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> Tensor:
        ctx.save_for_backward(hidden, weight, targets)
        ctx.temperature = temperature
        parts = []
        for h, target in zip(hidden.split(_CHUNK), targets.split(_CHUNK), strict=True):
            logprobs = _log_softmax(h, weight, temperature)
            parts.append(logprobs.gather(1, target[:, None]).squeeze(1))
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        hidden, weight, targets = ctx.saved_tensors
        parts = []
        chunks = zip(hidden.split(_CHUNK), targets.split(_CHUNK), gradients[0].split(_CHUNK), strict=True)
        for h, target, gradient in chunks:
            # d logp[target] / d logits = onehot - softmax, without building the one-hot
            d_logits = _log_softmax(h, weight, ctx.temperature).exp_().mul_(-gradient[:, None])
            d_logits.scatter_add_(1, target[:, None], gradient[:, None])
            parts.append((d_logits / ctx.temperature).to(weight.dtype) @ weight)
        return torch.cat(parts), None, None, None


def _log_softmax(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    logits = hidden @ weight.T
    precise = logits if logits.dtype == torch.float64 else logits.float()
    return torch.log_softmax(precise / temperature, dim=-1)
