"""LoRA adapters as values, and the layers that apply them.

A base model's linear layers are wrapped once; what a forward pass adds to them is then a value,
an `AdapterBatch`, given by a context manager and gone when it ends. The policy, its frozen
reference and a hypernetwork's adapters of many documents all go through here, so that the base
model exists once and no adapter is ever switched on by hand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn

from grpo_core.errors import ConfigError


@dataclass(frozen=True)
class AdapterBatch:
    """LoRA weights of n adapters for the same layers: y = W x + scaling * B (A x).

    Attributes:
        a: per layer name ``float[n, rank, d_in]``.
        b: per layer name ``float[n, d_out, rank]``.
        scaling: alpha / rank.
    """

    a: dict[str, Tensor]
    b: dict[str, Tensor]
    scaling: float

    @property
    def requires_grad(self) -> bool:
        """Whether gradients are wanted for these weights."""
        return any(weight.requires_grad for weight in (*self.a.values(), *self.b.values()))

    def detached(self) -> AdapterBatch:
        """The same values without gradients."""
        return AdapterBatch(
            {k: v.detach() for k, v in self.a.items()}, {k: v.detach() for k, v in self.b.items()}, self.scaling
        )


NO_ADAPTER = AdapterBatch({}, {}, 0.0)


class AdaptedLinear(nn.Module):
    """A frozen linear layer that adds whatever adapter is applied at the moment."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base = base
        self.active: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Apply to ``x: float[rows, tokens, d_in]``; n adapters serve n rows, one adapter serves all."""
        y = self.base(x)
        if self.active is None:
            return y
        a, b = self.active
        if a.shape[0] == 1:
            return y + x @ a[0].T @ b[0].T
        return y + x @ a.transpose(1, 2) @ b.transpose(1, 2)


def wrap_linear_layers(model: nn.Module, suffixes: Sequence[str]) -> dict[str, nn.Linear]:
    """Wrap every linear layer whose last name is in `suffixes`; wrapping twice changes nothing.

    Returns:
        The frozen layers by their original dotted names.

    Raises:
        ConfigError: a suffix matches no linear layer.
    """
    found: dict[str, nn.Linear] = {}
    for name, module in list(model.named_modules()):
        leaf = name.rpartition(".")[2]
        if leaf not in suffixes:
            continue
        if isinstance(module, AdaptedLinear):
            found[name] = module.base
        elif isinstance(module, nn.Linear):
            parent = model.get_submodule(name.rpartition(".")[0])
            setattr(parent, leaf, AdaptedLinear(module))
            found[name] = module
    missing = [suffix for suffix in suffixes if not any(name.rpartition(".")[2] == suffix for name in found)]
    if missing:
        raise ConfigError(f"the model has no linear layers named {missing}", field="target_modules")
    return found


@contextmanager
def applied(model: nn.Module, adapters: AdapterBatch, rows: Tensor | None = None) -> Iterator[None]:
    """Apply adapters to the model's wrapped layers within the context.

    Weights are cast once to the base model's dtype: the product runs as fast as the base's own,
    gradients flow back to the leaves in the leaves' dtype (fp32 masters).

    Args:
        rows: ``int[rows]``, the adapter of each row of the batch; None when one adapter serves all rows.
    """
    layers = {name: model.get_submodule(name) for name in adapters.a}
    try:
        for name, layer in layers.items():
            assert isinstance(layer, AdaptedLinear)
            a, b = adapters.a[name], adapters.b[name]
            if rows is not None and a.shape[0] > 1:
                a, b = a[rows], b[rows]
            dtype = layer.base.weight.dtype
            layer.active = (a.to(dtype), (b * adapters.scaling).to(dtype))
        yield
    finally:
        for layer in layers.values():
            layer.active = None  # type: ignore[assignment]


@contextmanager
def serving_rows(model: nn.Module, rows: Tensor) -> Iterator[None]:
    """Within `applied` adapters of several rows: repeat them for these ``int[rows]`` of a larger batch."""
    several = [m for m in model.modules() if isinstance(m, AdaptedLinear) and m.active and len(m.active[0]) > 1]
    before = [layer.active for layer in several]
    try:
        for layer in several:
            assert layer.active is not None
            a, b = layer.active
            layer.active = a[rows], b[rows]
        yield
    finally:
        for layer, active in zip(several, before, strict=True):
            layer.active = active
