"""The engine of every other model: transformers' own forward over packed rows and a dynamic cache.

Whether a model heeds a mask of ours cannot be known beforehand, so the first groups are also computed without
sharing; where the two differ, groups are computed unshared from then on, and slower.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from grpo_core.engines.base import Prefill
from grpo_core.packing import PADDING, PROMPT, Group, attention_masks, pack_groups
from grpo_core.policies.adapters import AdapterBatch, applied, serving_rows

logger = logging.getLogger(__name__)

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Largest relative difference of a hidden state, shared against unshared, by dtype."""

_COARSE_TOLERANCE = 0.05  # 16-bit formats: rounding alone gives about 0.01


class GenericEngine:
    """See `base.Engine`."""

    name = "transformers"

    def __init__(self, model: PreTrainedModel):
        self.shares_prompts = True
        self._model = model
        self._verified = False

    def enable_gradient_checkpointing(self) -> None:
        """See `base.Engine`. transformers does so in train mode only, which also turns dropout on."""
        self._model.activation_checkpointing_enable({"use_reentrant": False})
        self._model.train()

    def prefill(self, prompts: Sequence[Sequence[int]], adapters: AdapterBatch) -> Prefill:
        """See `base.Engine`. Nothing is computed yet: this engine's cache serves decoding only."""
        return Prefill(prompts, adapters, None)

    def decoding(self, prefill: Prefill, group: int) -> GenericDecoding:
        """See `base.Engine`."""
        return GenericDecoding(self._model, prefill.prompts, prefill.adapters, group)

    def predicting(self, groups: Sequence[Group], prefill: Prefill | None = None) -> Tensor:
        """See `base.Engine`."""
        if not self._verified:
            self._verify(groups)
        return self._packed(groups) if self.shares_prompts else self._unshared(groups)

    def _packed(self, groups: Sequence[Group]) -> Tensor:
        packed = pack_groups(groups, self._model.device)
        masks = attention_masks(self._model, packed.positions, packed.segments, packed.positions, packed.segments)
        hidden = self._model.base_model(
            input_ids=packed.input_ids, attention_mask=masks, position_ids=packed.positions, use_cache=False
        ).last_hidden_state
        return hidden[packed.row, packed.source]

    def _unshared(self, groups: Sequence[Group]) -> Tensor:
        """Every completion behind its own copy of the prompt; the model's own causal mask hides what comes later."""
        alone = [(number, prompt, c) for number, (prompt, completions) in enumerate(groups) for c in completions if c]
        owner = torch.tensor([number for number, _, _ in alone], device=self._model.device)
        packed = pack_groups([(prompt, [completion]) for _, prompt, completion in alone], self._model.device)
        with serving_rows(self._model, owner):
            hidden = self._model.base_model(input_ids=packed.input_ids, use_cache=False).last_hidden_state
        return hidden[packed.row, packed.source]

    @torch.no_grad()
    def _verify(self, groups: Sequence[Group]) -> None:
        shared, unshared = self._packed(groups).double(), self._unshared(groups).double()
        difference = float(((shared - unshared).norm(dim=-1) / unshared.norm(dim=-1)).max())
        self.shares_prompts = difference <= TOLERANCES.get(self._model.dtype, _COARSE_TOLERANCE)
        self._verified = True
        if not self.shares_prompts:
            logger.warning(
                "a model of type %r computes other states when a group shares its prompt (relative difference %.2g): "
                "groups are computed unshared, which is slower",
                self._model.config.model_type,
                difference,
            )


class GenericDecoding:
    """See `base.Decoding`."""

    def __init__(self, model: PreTrainedModel, prompts: Sequence[Sequence[int]], adapters: AdapterBatch, group: int):
        self._model, self._adapters = model, adapters
        device = model.device
        length = max(len(prompt) for prompt in prompts)
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        positions = torch.arange(length, device=device).expand(len(prompts), -1)
        # A plain dynamic cache keeps every key: the sliding window is in the mask, where it counts positions.
        self._cache = DynamicCache()
        self._positions, self._segments = positions, torch.where(positions < lengths[:, None], PROMPT, PADDING)
        self._owner: Tensor = torch.arange(len(prompts), device=device)
        ids = torch.tensor([[*prompt, *[0] * (length - len(prompt))] for prompt in prompts], device=device)
        hidden = self._forward(ids)[self._owner, lengths - 1]

        self._cache.batch_repeat_interleave(group)
        self._positions, self._segments = (t.repeat_interleave(group, 0) for t in (self._positions, self._segments))
        self._owner = self._owner.repeat_interleave(group)
        self._next: Tensor = lengths.repeat_interleave(group)
        self.hidden = hidden.repeat_interleave(group, dim=0)

    def keep(self, places: Tensor) -> None:
        """See `base.Decoding`."""
        self._cache.batch_select_indices(places)
        self._positions, self._segments = self._positions[places], self._segments[places]
        self._owner, self._next = self._owner[places], self._next[places]

    def step(self, tokens: Tensor) -> None:
        """See `base.Decoding`."""
        self._positions = torch.cat([self._positions, self._next[:, None]], dim=1)
        self._segments = torch.cat([self._segments, torch.full_like(self._next[:, None], PROMPT + 1)], dim=1)
        self._next = self._next + 1
        self.hidden = self._forward(tokens[:, None])[:, -1]

    @torch.no_grad()
    def _forward(self, ids: Tensor) -> Tensor:
        """States of the newest ``ids.shape[1]`` tokens; positions and segments cover the cache as well."""
        new, positions, segments = ids.shape[1], self._positions, self._segments
        masks = attention_masks(self._model, positions[:, -new:], segments[:, -new:], positions, segments)
        with applied(self._model, self._adapters, self._owner):
            return self._model.base_model(
                input_ids=ids,
                attention_mask=masks,
                position_ids=positions[:, -new:],
                cache=self._cache,
                use_cache=True,
            ).last_hidden_state
