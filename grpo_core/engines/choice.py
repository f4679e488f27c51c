"""Which engine computes a model."""

from __future__ import annotations

from transformers import PreTrainedModel

from grpo_core.engines.base import Engine
from grpo_core.engines.decoder import supports
from grpo_core.engines.generic import GenericEngine
from grpo_core.engines.native import NativeEngine


def make_engine(model: PreTrainedModel) -> Engine:
    """The written-out decoder where it is known to be exact, transformers' own forward elsewhere."""
    return NativeEngine(model) if supports(model) else GenericEngine(model)
