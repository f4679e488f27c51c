"""Which queries attend to which keys, cut into blocks: the layout of the written-out decoder's attention.

Tokens of all prompts lie flat behind one another, and so do the tokens of all completions. A block is
a run of queries with the keys it may see; `packing.visible` remains the one rule of who sees whom.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from grpo_core.engines.functions import VECTOR, Block, aligned
from grpo_core.packing import PROMPT, visible

LONGEST_BLOCK = 256
"""Queries of one block. Keys after the block's last query are not computed at all."""

SHORTEST_BLOCK = 128
"""Short completions of a group share a block until it has so many queries."""


def spans(lengths: Sequence[int]) -> list[slice]:
    """Where runs of these lengths lie when they follow one another."""
    ends = list(accumulate(lengths))
    return [slice(end - length, end) for length, end in zip(lengths, ends, strict=True)]


def prompt_blocks(lengths: Sequence[int], window: int | None, like: Tensor) -> list[Block]:
    """Every prompt token over its own prompt; masks in dtype and device of `like`."""
    return [
        _prompt_block(span.start, first, min(first + LONGEST_BLOCK, length), window, like)
        for span, length in zip(spans(lengths), lengths, strict=True)
        for first in range(0, length, LONGEST_BLOCK)
    ]


def last_token_blocks(lengths: Sequence[int], window: int | None, like: Tensor) -> list[Block]:
    """The last token of every prompt over its own prompt."""
    return [
        _prompt_block(span.start, length - 1, length, window, like)
        for span, length in zip(spans(lengths), lengths, strict=True)
    ]


def completion_blocks(
    prompts: Sequence[int], completions: Sequence[Sequence[int]], window: int | None, like: Tensor
) -> list[Block]:
    """Completion tokens over their group's prompt and their own completion.

    Args:
        prompts: length of each group's prompt. completions: lengths of its completions, 0 allowed.
    """
    blocks = []
    row = 0
    for prefix, length, group in zip(spans(prompts), prompts, completions, strict=True):
        for first, run in _runs(group):
            segments = [first + k for k, count in enumerate(run) for _ in range(count)]
            positions = [length + i for count in run for i in range(count)]
            for begin in range(0, len(positions), LONGEST_BLOCK):
                end = min(begin + LONGEST_BLOCK, len(positions))
                seen = visible(
                    torch.tensor([positions[begin:end]]),
                    torch.tensor([segments[begin:end]]),
                    torch.tensor([[*range(length), *positions[:end]]]),
                    torch.tensor([[PROMPT] * length + segments[:end]]),
                    window,
                )
                blocks.append(
                    Block(slice(row + begin, row + end), slice(row, row + end), prefix, _additive(seen[0, 0], like))
                )
            row += len(positions)
    return blocks


def _runs(lengths: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
    """Completions of a group in runs of at least `SHORTEST_BLOCK` tokens: first segment and lengths of each."""
    first, run = PROMPT + 1, list[int]()
    for segment, length in enumerate(lengths, start=PROMPT + 1):
        run.append(length)
        if sum(run) >= SHORTEST_BLOCK:
            yield first, run
            first, run = segment + 1, []
    if sum(run):
        yield first, run


def _prompt_block(start: int, first: int, end: int, window: int | None, like: Tensor) -> Block:
    """Queries at positions first..end of the prompt that begins at row `start`."""
    oldest = 0 if window is None else max(0, first - window + 1)
    positions = torch.arange(oldest, end)[None]
    segments = torch.full_like(positions, PROMPT)
    new = end - first
    seen = visible(positions[:, -new:], segments[:, -new:], positions, segments, window)
    keys = slice(start + oldest, start + end)
    return Block(slice(start + first, start + end), keys, slice(0, 0), _additive(seen[0, 0], like))


def _additive(seen: Tensor, like: Tensor) -> Tensor | None:
    """0 where ``seen: bool[queries, columns]``, else -inf, as in padding; without the columns that all see before."""
    seen = F.pad(seen, (0, aligned(seen.shape[1]) - seen.shape[1]))
    hidden = (~seen).any(0).nonzero()
    if not len(hidden):
        return None
    seen = seen[:, int(hidden[0]) // VECTOR * VECTOR :]
    return torch.zeros(seen.shape).masked_fill_(~seen, float("-inf")).to(like)
