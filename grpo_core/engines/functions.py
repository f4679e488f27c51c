"""Differentiable pieces of a decoder layer with hand-written backward passes.

Autograd over the plain expressions gives the same gradients (tests prove it) but keeps and copies far
more: these write into halves of one buffer, add products in place, and skip what is frozen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
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
        mask: ``float[queries, columns]``, 0 or -inf, for the *last* columns of the scores; None where all is seen.
    """

    queries: slice
    keys: slice
    prefix: slice
    mask: Tensor | None

    @property
    def rows(self) -> int:
        """Number of queries."""
        return int(self.queries.stop - self.queries.start)

    @property
    def columns(self) -> int:
        """Columns of the scores: keys of prefix and block, then padding."""
        return aligned(self.prefix.stop - self.prefix.start + self.keys.stop - self.keys.start)


VECTOR = 32
"""Columns that softmax takes at once: on a CPU scores whose width is a multiple are twice as fast as others."""


def aligned(columns: int) -> int:
    """The next multiple of `VECTOR`."""
    return -(-columns // VECTOR) * VECTOR


def apply(function: type[Function], *arguments: Any) -> Any:
    """``function.apply``, or its forward pass alone where gradients are off.

    Recording nothing costs as much as a small operation: 17 of 48 µs for the norm of 32 rows.
    """
    if torch.is_grad_enabled():
        return function.apply(*arguments)
    return function.forward(_Nothing(), *arguments)


class _Nothing:
    """A context that keeps nothing."""

    def save_for_backward(self, *tensors: Tensor) -> None:
        pass


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
            db[number] = (down.T @ dy[span]).T  # a fifth faster than dy^T down on a CPU
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
        out = q.new_empty(sum(block.rows for block in blocks), *q.shape[1:])
        kept = []
        for block, rows in zip(blocks, _rows(blocks), strict=True):
            keys, values = _joined(prefix_k, k, block), _joined(prefix_v, v, block)
            scores = _folded(q[block.queries], kv_heads) @ keys.mT
            if block.mask is not None:
                scores.view(kv_heads, -1, block.rows, block.columns)[..., -block.mask.shape[1] :] += block.mask
            kept.append(torch.softmax(scores, dim=-1))
            _unfold(kept[-1] @ values, out[rows])
        ctx.save_for_backward(q, k, v, prefix_k, prefix_v, *kept)
        ctx.blocks = blocks
        return out.flatten(1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """The transposed products of each block; what several blocks saw is summed."""
        q, k, v, prefix_k, prefix_v, *kept = ctx.saved_tensors
        kv_heads = k.shape[1]
        dq = torch.zeros_like(q)
        # keys by head first, as the products give them: sums run over contiguous memory
        dk, dv, d_prefix_k, d_prefix_v = (
            x.new_zeros(kv_heads, x.shape[0], x.shape[2]) for x in (k, v, prefix_k, prefix_v)
        )
        for block, rows, probabilities in zip(ctx.blocks, _rows(ctx.blocks), kept, strict=True):
            d_out = _folded(gradients[0][rows].view(block.rows, *q.shape[1:]), kv_heads)
            keys, values = _joined(prefix_k, k, block), _joined(prefix_v, v, block)
            d_values = probabilities.mT @ d_out
            d_scores = torch.ops.aten._softmax_backward_data(d_out @ values.mT, probabilities, -1, q.dtype)
            _unfold(d_scores @ keys, dq[block.queries])
            d_keys = d_scores.mT @ _folded(q[block.queries], kv_heads)
            before, own = (int(part.stop - part.start) for part in (block.prefix, block.keys))
            for whole, d_before, d_own in ((d_keys, d_prefix_k, dk), (d_values, d_prefix_v, dv)):
                d_before[:, block.prefix] += whole[:, :before]
                d_own[:, block.keys] += whole[:, before : before + own]
        return dq, *(x.transpose(0, 1) for x in (dk, dv, d_prefix_k, d_prefix_v)), None


def add_adapted(y: Tensor, x: Tensor, a: Tensor, b: Tensor, spans: Sequence[slice]) -> list[Tensor]:
    """Add (x A^T) B^T of each span to y in place; returns the x A^T."""
    downs = []
    for span, a_, b_ in zip(spans, a, b, strict=True):
        downs.append(x[span] @ a_.T)
        y[span].addmm_(downs[-1], b_.T)
    return downs


def _rows(blocks: Sequence[Block]) -> list[slice]:
    """Where each block's queries lie in the result."""
    ends = list(accumulate(block.rows for block in blocks))
    return [slice(end - block.rows, end) for block, end in zip(blocks, ends, strict=True)]


def _folded(x: Tensor, kv_heads: int) -> Tensor:
    """``[n, heads, d] -> [kv_heads, heads / kv_heads * n, d]``: queries of heads that share keys, as rows."""
    rows, heads, width = x.shape
    return x.view(rows, kv_heads, heads // kv_heads, width).permute(1, 2, 0, 3).reshape(kv_heads, -1, width)


def _unfold(x: Tensor, out: Tensor) -> None:
    """The inverse of `_folded`, written into ``out[n, heads, d]``."""
    rows, heads, width = out.shape
    kv_heads = len(x)
    by_row = x.view(kv_heads, heads // kv_heads, rows, width).permute(2, 0, 1, 3)
    out.view(rows, kv_heads, heads // kv_heads, width).copy_(by_row)


def _joined(prefix: Tensor, own: Tensor, block: Block) -> Tensor:
    """``[kv_heads, columns, d_head]``: keys of prefix and block, then zeros; contiguous."""
    parts = prefix[block.prefix].transpose(0, 1), own[block.keys].transpose(0, 1)
    missing = block.columns - sum(part.shape[1] for part in parts)
    return torch.cat([*parts, own.new_zeros(1, 1, 1).expand(len(parts[1]), missing, own.shape[2])], dim=1)


def _precise(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
