"""The decoder of Llama, Mistral and Qwen3 written out: embedding, layers, final norm, over flat tokens.

How tokens attend is the caller's business (`Attend`), so training, prefill and decoding run through the
same few lines. Projections that read the same input are one matrix product, their adapters too.
`supports` says which models it knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from grpo_core.engines.functions import AdaptedProduct, RMSNorm, Rotary, SwiGLU, add_adapted, apply
from grpo_core.engines.packed_weights import FEW_ROWS, packed_linear
from grpo_core.policies.adapters import AdaptedLinear

ARCHITECTURES = ("llama", "mistral", "qwen3")

Pair = tuple[Tensor, Tensor]
"""A and B of one product: ``[adapters, rank, d_in]`` and ``[adapters, d_out, rank]``."""

Adapters = list[list[Pair | None]]
"""Per layer, for each of its four products in the order in which they are computed."""


class Attend(Protocol):
    """How the tokens of a pass attend: in training over blocks, in decoding over caches."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Scaled ``q[tokens, heads, d_head]`` over ``k, v[tokens, kv_heads, d_head]`` and whatever came before.

        Returns:
            ``[rows that go on, heads * d_head]``.
        """
        ...


@dataclass(frozen=True)
class Hidden:
    """What a pass computes.

    Attributes:
        states: ``[rows, d_model]`` after the final norm.
        keys, values: per layer ``[tokens, kv_heads, d_head]``.
    """

    states: Tensor
    keys: list[Tensor]
    values: list[Tensor]


def supports(model: PreTrainedModel) -> bool:
    """Whether this model is one that `Decoder` computes exactly."""
    config = model.config
    known = config.model_type in ARCHITECTURES and config.hidden_act == "silu"
    return known and not any(isinstance(m, nn.Linear) and m.bias is not None for m in model.base_model.modules())


class Decoder:
    """Computes with a transformers model's own weights, which become views of joined matrices."""

    def __init__(self, model: PreTrainedModel):
        decoder: Any = model.base_model
        self.kv_heads: int = model.config.num_key_value_heads
        self.windows = _windows(model)
        self.weights: Tensor = decoder.embed_tokens.weight
        self.gradient_checkpointing = False
        self._embed, self._rotary, self._norm = decoder.embed_tokens, decoder.rotary_emb, decoder.norm
        self._heads: int = model.config.num_attention_heads
        self._layers = [_Layer(layer) for layer in decoder.layers]

    def adapters(self) -> Adapters:
        """The adapters applied to the model at the moment."""
        return [[part.adapter() for part in layer.products] for layer in self._layers]

    def __call__(
        self,
        ids: Tensor,
        positions: Tensor,
        adapters: Adapters,
        rows: Sequence[slice],
        attend: Attend,
        ends: Tensor | None = None,
    ) -> Hidden:
        """Compute flat tokens.

        Args:
            ids, positions: ``int[tokens]``.
            rows: the tokens that each of several adapters serves; a single adapter serves all.
            ends: the one token of each group that goes on after the last layer's attention, as `attend` answers
                it; None keeps all.
        """
        x = self._embed(ids)
        rope = self._rope(positions, x)
        keys, values = [], []
        for number, layer in enumerate(self._layers):
            kept = ends if number == len(self._layers) - 1 else None
            arguments = (layer, number, x, adapters[number], rope, rows, attend, kept)
            if self.gradient_checkpointing and torch.is_grad_enabled():
                x, k, v = checkpoint(self._layer, *arguments, use_reentrant=False)
            else:
                x, k, v = self._layer(*arguments)
            keys.append(k)
            values.append(v)
        return Hidden(_norm(x, self._norm), keys, values)

    def _layer(
        self,
        layer: _Layer,
        number: int,
        x: Tensor,
        adapters: Sequence[Pair | None],
        rope: Sequence[Tensor],
        rows: Sequence[slice],
        attend: Attend,
        kept: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        for_qkv, for_out, for_gate_up, for_down = adapters
        qkv_product, out_product, gate_up_product, down_product = layer.products
        cos, sin, scaled_cos, scaled_sin = rope
        qkv = qkv_product(_norm(x, layer.attention_norm), for_qkv, rows).view(len(x), -1, cos.shape[-1])
        q, k, v = qkv.split([self._heads, self.kv_heads, self.kv_heads], dim=1)
        if layer.head_norms is not None:
            q, k = _norm(q, layer.head_norms[0]), _norm(k, layer.head_norms[1])
        k = apply(Rotary, k, cos, sin)
        attended = attend(number, apply(Rotary, q, scaled_cos, scaled_sin), k, v)
        if kept is not None:
            x, rows = x[kept], [slice(i, i + 1) for i in range(len(kept))]
        x = x + out_product(attended, for_out, rows)
        gate_up = gate_up_product(_norm(x, layer.mlp_norm), for_gate_up, rows)
        return x + down_product(apply(SwiGLU, gate_up), for_down, rows), k, v

    def _rope(self, positions: Tensor, like: Tensor) -> list[Tensor]:
        """Cosines and sines, plain and times the scaling of queries: ``[tokens, 1, d_head]``, `sin` signed."""
        precise = like.new_zeros(1, dtype=torch.promote_types(like.dtype, torch.float32))
        cos, sin = self._rotary(precise, positions[None])
        half = sin.shape[-1] // 2
        sin = torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)
        scaling = self._layers[0].scaling
        return [part[0, :, None].to(like.dtype) for part in (cos, sin, cos * scaling, sin * scaling)]


class _Layer:
    """The weights of one decoder layer, in the form in which they are read."""

    def __init__(self, layer: Any):
        attention, mlp = layer.self_attn, layer.mlp
        self.products = [
            _Product(attention, ["q_proj", "k_proj", "v_proj"]),
            _Product(attention, ["o_proj"]),
            _Product(mlp, ["gate_proj", "up_proj"]),
            _Product(mlp, ["down_proj"]),
        ]
        self.attention_norm, self.mlp_norm = layer.input_layernorm, layer.post_attention_layernorm
        self.head_norms = (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else None
        self.scaling: float = attention.scaling


class _Product:
    """Linear layers that read the same input, as one matrix of which the model's own weights become views."""

    def __init__(self, parent: nn.Module, names: Sequence[str]):
        self._parent, self._names = parent, names
        linears = [module.base if isinstance(module, AdaptedLinear) else module for module in self._modules()]
        self._sizes = [linear.out_features for linear in linears]
        self._weight: Tensor = linears[0].weight.data
        if len(linears) > 1:
            self._weight = torch.cat([linear.weight.data for linear in linears])
            for linear, part in zip(linears, self._weight.split(self._sizes), strict=True):
                linear.weight.data = part
        self._few_rows = packed_linear(self._weight)

    def _modules(self) -> list[Any]:
        return [getattr(self._parent, name) for name in self._names]

    def adapter(self) -> Pair | None:
        """A of all layers stacked, B on a block diagonal; None where no adapter is applied."""
        active = [module.active if isinstance(module, AdaptedLinear) else None for module in self._modules()]
        present = [pair for pair in active if pair is not None]
        if not present:
            return None
        rank = sum(a.shape[-2] for a, _ in present)
        blocks, offset = [], 0
        for pair, size in zip(active, self._sizes, strict=True):
            if pair is None:
                blocks.append(present[0][1].new_zeros(len(present[0][1]), size, rank))
            else:
                width = pair[1].shape[-1]
                blocks.append(F.pad(pair[1], (offset, rank - offset - width)))
                offset += width
        return torch.cat([a for a, _ in present], dim=-2), torch.cat(blocks, dim=-2)

    def __call__(self, x: Tensor, adapter: Pair | None, rows: Sequence[slice]) -> Tensor:
        """``[tokens, d_in] -> [tokens, all d_out]``."""
        spans = rows if adapter is not None and len(adapter[0]) > 1 else [slice(None)]
        if torch.is_grad_enabled() and adapter is not None:
            return AdaptedProduct.apply(x, self._weight, *adapter, spans)  # type: ignore[no-any-return]
        few = len(x) <= FEW_ROWS and not torch.is_grad_enabled()
        y = self._few_rows(x) if few else F.linear(x, self._weight)
        if adapter is not None:
            add_adapted(y, x, *adapter, spans)
        return y


def _norm(x: Tensor, module: Any) -> Tensor:
    return apply(RMSNorm, x, module.weight, module.variance_epsilon)  # type: ignore[no-any-return]


def _windows(model: PreTrainedModel) -> list[int | None]:
    """Positions that each layer sees, the own included; None sees all."""
    config = model.config
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if types is None:
        return [window] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in types]
