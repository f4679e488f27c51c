"""Differentiable pieces of a decoder layer with hand-written backward passes.

Autograd over the plain expressions gives the same gradients (tests prove it) but keeps and copies far
more: these write into halves of one buffer, add products in place, and skip what is frozen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function


@dataclass(frozen=True)
class Block:
    """Some rows of queries and all the keys that they may see.

    Attributes:
        queries: rows of q. keys: rows of k and v of the same tokens' sequence. prefix: rows of the prefix before them.
        mask: ``float[queries, columns]``, 0 or -inf, for the *last* columns of prefix and keys; None where all is seen.
    """

    queries: slice
    keys: slice
    prefix: slice
    mask: Tensor | None

    @property
    def rows(self) -> int:
        """Number of queries."""
        return int(self.queries.stop - self.queries.start)


class AdaptedProduct(Function):
    """y = x W^T + (x A^T) B^T with W frozen and one A, B per span of rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, a: Tensor, b: Tensor, spans: Sequence[slice]) -> Tensor:
        """Args: ``x[tokens, d_in]``, ``weight[d_out, d_in]``, ``a[spans, rank, d_in]``, ``b[spans, d_out, rank]``."""
        y = F.linear(x, weight)
        downs = add_adapted(y, x, a, b, spans)
        ctx.save_for_backward(x, weight, a, b, *downs)
        ctx.spans = spans
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, Tensor, Tensor, None]:
        """Gradients of x, A and B; that of x is skipped where nothing below is trained."""
        (dy,) = gradients
        x, weight, a, b, *downs = ctx.saved_tensors
        dx = dy @ weight if ctx.needs_input_grad[0] else None
        da, db = torch.empty_like(a), torch.empty_like(b)
        for number, (span, down) in enumerate(zip(ctx.spans, downs, strict=True)):
            d_down = dy[span] @ b[number]
            if dx is not None:
                dx[span].addmm_(d_down, a[number])
            torch.mm(d_down.T, x[span], out=da[number])
            torch.mm(dy[span].T, down, out=db[number])
        return dx, None, da, db, None


class RMSNorm(Function):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv 1910.07467), computed in fp32 or better."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Any leading shape; ``weight[d]`` is frozen."""
        precise = _precise(x)
        scale = torch.linalg.vecdot(precise, precise)[..., None].div_(x.shape[-1]).add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (precise * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """With n = x s: dx = s (g w - n mean(g w n))."""
        x, weight, scale = ctx.saved_tensors
        normal = _precise(x) * scale
        weighted = _precise(gradients[0]) * weight
        along = torch.linalg.vecdot(weighted, normal)[..., None].div_(x.shape[-1])
        return weighted.addcmul_(normal, along, value=-1).mul_(scale).to(x.dtype), None, None


class SwiGLU(Function):
    """silu(gate) * up of ``[gate | up]`` (arXiv 2002.05202)."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        """``float[tokens, 2 d] -> float[tokens, d]``."""
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """Both halves in one buffer, ready for one matrix product."""
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        result = torch.empty_like(gate_up)
        d_gate, d_up = result.chunk(2, dim=-1)
        torch.mul(gradients[0], F.silu(gate), out=d_up)
        torch.ops.aten.silu_backward.grad_input(gradients[0] * up, gate, grad_input=d_gate)
        return result


class Rotary(Function):
    """Rotary position embedding in the half-split form that transformers uses (arXiv 2104.09864)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``x[tokens, heads, d_head]``; ``cos``, ``sin`` ``[tokens, 1, d_head]``, the first half of `sin` negated."""
        ctx.save_for_backward(cos, sin)
        return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """A rotation's transpose turns the other way."""
        (gradient,) = gradients
        cos, sin = ctx.saved_tensors
        half = gradient.shape[-1] // 2
        return torch.addcmul(gradient * cos, gradient.roll(half, -1), sin, value=-1), None, None


class BlockAttention(Function):
    """Softmax attention of blocks of queries over their prefix and their own keys.

    Scores and probabilities are computed by matrix products over whole blocks; heads that share keys
    (grouped queries, arXiv 2305.13245) are rows of one product. Probabilities are kept for the
    backward pass in the model's dtype.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, prefix_k: Tensor, prefix_v: Tensor, blocks: Sequence[Block]
    ) -> Tensor:
        """Attend.

        Args:
            q: ``[tokens, heads, d_head]``, already scaled. k, v: ``[tokens, kv_heads, d_head]``.
            prefix_k, prefix_v: ``[prefix tokens, kv_heads, d_head]``.

        Returns:
            ``[queries of all blocks, heads * d_head]``, in order of the blocks.
        """
        kv_heads = k.shape[1]
        parts, kept = [], []
        for block in blocks:
            queries = fold_heads(q[block.queries], kv_heads)
            keys, values = _before(prefix_k, k, block), _before(prefix_v, v, block)
            scores = queries @ keys.mT
            if block.mask is not None:
                scores.view(kv_heads, -1, block.rows, keys.shape[1])[..., -block.mask.shape[1] :] += block.mask
            probabilities = torch.softmax(scores, dim=-1)
            parts.append(unfold_heads(probabilities @ values, block.rows))
            kept.append(probabilities)
        ctx.save_for_backward(q, k, v, prefix_k, prefix_v, *kept)
        ctx.blocks = blocks
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """The transposed products of each block; what several blocks saw is summed."""
        q, k, v, prefix_k, prefix_v, *kept = ctx.saved_tensors
        kv_heads = k.shape[1]
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        d_prefix_k, d_prefix_v = torch.zeros_like(prefix_k), torch.zeros_like(prefix_v)
        row = 0
        for block, probabilities in zip(ctx.blocks, kept, strict=True):
            d_out = gradients[0][row : row + block.rows].view(block.rows, -1, q.shape[-1])
            row += block.rows
            d_out = fold_heads(d_out, kv_heads)
            queries = fold_heads(q[block.queries], kv_heads)
            keys, values = _before(prefix_k, k, block), _before(prefix_v, v, block)
            d_values = probabilities.mT @ d_out
            d_scores = torch.ops.aten._softmax_backward_data(d_out @ values.mT, probabilities, -1, q.dtype)
            dq[block.queries] += unfold_heads(d_scores @ keys, block.rows).view(block.rows, -1, q.shape[-1])
            d_keys = d_scores.mT @ queries
            length = int(block.prefix.stop - block.prefix.start)
            for whole, d_before, d_own in ((d_keys, d_prefix_k, dk), (d_values, d_prefix_v, dv)):
                d_before[block.prefix] += whole[:, :length].transpose(0, 1)
                d_own[block.keys] += whole[:, length:].transpose(0, 1)
        return dq, dk, dv, d_prefix_k, d_prefix_v, None


def add_adapted(y: Tensor, x: Tensor, a: Tensor, b: Tensor, spans: Sequence[slice]) -> list[Tensor]:
    """Add (x A^T) B^T of each span to y in place; returns the x A^T."""
    downs = []
    for span, a_, b_ in zip(spans, a, b, strict=True):
        downs.append(x[span] @ a_.T)
        y[span].addmm_(downs[-1], b_.T)
    return downs


def fold_heads(x: Tensor, kv_heads: int) -> Tensor:
    """``[n, heads, d] -> [kv_heads, heads / kv_heads * n, d]``: queries of heads that share keys, as rows."""
    rows, heads, width = x.shape
    return x.view(rows, kv_heads, heads // kv_heads, width).permute(1, 2, 0, 3).reshape(kv_heads, -1, width)


def unfold_heads(x: Tensor, rows: int) -> Tensor:
    """The inverse of `fold_heads`, flat: ``[kv_heads, repeats * n, d] -> [n, heads * d]``."""
    kv_heads, _, width = x.shape
    return x.view(kv_heads, -1, rows, width).permute(2, 0, 1, 3).reshape(rows, -1)


def _before(prefix: Tensor, own: Tensor, block: Block) -> Tensor:
    """``[kv_heads, keys of prefix and block, d_head]``."""
    own = own[block.keys]
    if block.prefix.stop > block.prefix.start:
        own = torch.cat([prefix[block.prefix], own])
    return own.transpose(0, 1)


def _precise(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
