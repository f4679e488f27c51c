"""Token-by-token decoding of groups that share their prompts' keys and values.

Linear layers see living rows only. Attention works on a rectangle of slots, groups by places: a prompt's keys
are read once for its whole group, as in Hydragen (arXiv 2402.05099), the completions' own keys lie in a cache
made in advance. Slots are given up when at most half of them live.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from grpo_core.engines.blocks import spans
from grpo_core.engines.decoder import Adapters, Decoder, Hidden
from grpo_core.engines.functions import aligned

CACHE_TOKENS = 64
"""Tokens by which the cache of completions grows."""


class NativeDecoding:
    """See `base.Decoding`."""

    @torch.no_grad()
    def __init__(self, decoder: Decoder, lengths: Sequence[int], prompts: Hidden, adapters: Adapters, group: int):
        """Start `group` rows on each prompt, of these lengths, under one adapter for all or one for each."""
        self._decoder = decoder
        self._adapters: Adapters = [[pair and (pair[0].detach(), pair[1].detach()) for pair in a] for a in adapters]
        self._prompts = self._groups = len(lengths)
        self._places = group
        device = decoder.weights.device
        self._lengths = self._group_lengths = torch.tensor(lengths, device=device)
        self._owner = torch.arange(len(lengths), device=device).repeat_interleave(group)
        self._slot = torch.arange(len(self._owner), device=device)
        self._prompt_keys = [_padded(keys, lengths) for keys in prompts.keys]
        self._prompt_values = [_padded(values, lengths) for values in prompts.values]
        kv_heads, d_head = prompts.keys[0].shape[1:]
        # many tiny products of few tokens: on a CPU a third of the time in fp32, where they are one batch
        dtype = torch.promote_types(decoder.weights.dtype, torch.float32) if device.type == "cpu" else None
        empty = decoder.weights.new_zeros(len(lengths), kv_heads, group, 0, d_head, dtype=dtype)
        self._own_keys = [empty] * len(prompts.keys)
        self._own_values = [empty] * len(prompts.keys)
        self._tokens = 0
        self._masks: dict[int | None, Tensor | None] = {}
        self._padding = decoder.weights.new_full((1, 1, 1, 1, 1), float("-inf"))
        self.hidden = prompts.states.repeat_interleave(group, dim=0)

    @property
    def _slots(self) -> int:
        return self._groups * self._places

    def keep(self, places: Tensor) -> None:
        """See `base.Decoding`."""
        self._slot, self._owner = self._slot[places], self._owner[places]
        if 2 * len(places) <= self._slots:
            self._compact()

    @torch.no_grad()
    def step(self, tokens: Tensor) -> None:
        """See `base.Decoding`."""
        if self._tokens == self._own_keys[0].shape[3]:
            self._own_keys = [_grown(cache) for cache in self._own_keys]
            self._own_values = [_grown(cache) for cache in self._own_values]
        positions = self._lengths[self._owner] + self._tokens
        self._tokens += 1
        self._masks = {window: self._prompt_mask(window) for window in set(self._decoder.windows)}
        rows = spans(torch.bincount(self._owner, minlength=self._prompts).tolist())
        self.hidden = self._decoder(tokens, positions, self._adapters, rows, self._attend).states

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One softmax over the prompt's keys and the row's own: `decoder.Attend`."""
        prompt_keys, prompt_values = self._prompt_keys[layer], self._prompt_values[layer]
        groups, kv_heads, length, d_head = prompt_keys.shape
        newest = self._tokens - 1
        self._own_keys[layer][:, :, :, newest] = self._in_slots(k).transpose(1, 2)
        self._own_values[layer][:, :, :, newest] = self._in_slots(v).transpose(1, 2)
        window = self._decoder.windows[layer]
        seen = slice(0 if window is None else max(0, newest - window + 1), newest + 1)

        # [groups, kv_heads, places, repeats, d_head]: all queries of a group that read the same keys, together
        queries = self._in_slots(q).view(groups, self._places, kv_heads, -1, d_head).transpose(1, 2).contiguous()
        shape = queries.shape[:-1]
        before = queries.view(groups, kv_heads, -1, d_head) @ prompt_keys.mT
        if (mask := self._masks[window]) is not None:
            before += mask
        own_keys, own_values = self._own_keys[layer][:, :, :, seen], self._own_values[layer][:, :, :, seen]
        own = queries.to(own_keys.dtype) @ own_keys.mT
        end = length + own.shape[-1]
        padding = self._padding.expand(*shape, aligned(end) - end)
        probabilities = torch.softmax(torch.cat([before.view(*shape, length), own, padding], dim=-1), dim=-1)
        before = probabilities[..., :length].to(q.dtype).reshape(groups, kv_heads, -1, length) @ prompt_values
        attended = probabilities[..., length:end] @ own_values
        attended += before.view(attended.shape)
        attended = attended.transpose(1, 2).reshape(self._slots, -1).to(q.dtype)
        return attended if len(q) == self._slots else attended[self._slot]

    def _in_slots(self, x: Tensor) -> Tensor:
        """``[rows, heads, d] -> [groups, places, heads, d]``; what lies in finished rows' slots is never read."""
        if len(x) < self._slots:
            x = x.new_zeros(self._slots, *x.shape[1:]).index_copy_(0, self._slot, x)
        return x.view(self._groups, self._places, *x.shape[1:])

    def _prompt_mask(self, window: int | None) -> Tensor | None:
        """``[groups, 1, 1, prompt tokens]``: -inf on padding and on what lies before the window."""
        columns = torch.arange(self._prompt_keys[0].shape[2], device=self._lengths.device)
        lengths = self._group_lengths[:, None]
        hidden = columns >= lengths
        if window is not None:
            hidden |= lengths + self._tokens - 1 - columns >= window
        if not bool(hidden.any()):
            return None
        mask = torch.zeros(hidden.shape, dtype=self._decoder.weights.dtype, device=hidden.device)
        return mask.masked_fill_(hidden, float("-inf"))[:, None, None]

    def _compact(self) -> None:
        """Make the rectangle as small as the living rows allow."""
        groups, row_group, counts = torch.unique(self._slot // self._places, return_inverse=True, return_counts=True)
        places = int(counts.max())
        if len(groups) * places == self._slots:
            return
        # rows are ordered by group, so a row's place is its distance from its group's first row
        first = counts.cumsum(0) - counts
        slot = row_group * places + torch.arange(len(row_group), device=groups.device) - first[row_group]
        source = (groups * self._places).repeat_interleave(places)  # any slot of the group where no row lives
        source[slot] = self._slot
        old_group, old_place = (source // self._places).view(-1, places), (source % self._places).view(-1, places)

        def chosen(cache: Tensor) -> Tensor:
            return cache.transpose(1, 2)[old_group, old_place].transpose(1, 2).contiguous()

        self._own_keys = [chosen(cache) for cache in self._own_keys]
        self._own_values = [chosen(cache) for cache in self._own_values]
        if len(groups) < self._groups:
            self._prompt_keys = [keys[groups] for keys in self._prompt_keys]
            self._prompt_values = [values[groups] for values in self._prompt_values]
            self._group_lengths = self._group_lengths[groups]
        self._slot, self._groups, self._places = slot, len(groups), places


def _padded(flat: Tensor, lengths: Sequence[int]) -> Tensor:
    """Keys of prompts, ``[tokens, kv_heads, d_head]``, as ``[prompts, kv_heads, longest, d_head]``."""
    return pad_sequence(list(flat.split(list(lengths))), batch_first=True).transpose(1, 2).contiguous()


def _grown(cache: Tensor) -> Tensor:
    """``[groups, kv_heads, places, tokens, d_head]`` with room for `CACHE_TOKENS` more."""
    *shape, _, d_head = cache.shape
    return torch.cat([cache, cache.new_zeros(*shape, CACHE_TOKENS, d_head)], dim=3)
