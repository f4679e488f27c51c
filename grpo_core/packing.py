"""A prompt and its group of completions as ONE row, so that the prompt is computed once.

A row is ``[prompt, c1, ..., cG]``: completions do not see each other, and each goes on from the
prompt's last position. The last token of a completion predicts nothing and is left out. What must be
predicted is listed flat (one entry a completion token), so that no loss ever sees padding.

Also here: the one rule of who sees whom, used by training and by decoding alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

PROMPT = 0  # segment of the shared prompt
PADDING = -1  # segment of padding; completion k has segment k + 1

Group = tuple[Sequence[int], Sequence[Sequence[int]]]
"""Prompt ids and the ids of its completions."""


@dataclass(frozen=True)
class PackedRows:
    """Packed groups. ``rows`` groups of up to ``length`` tokens; ``tokens`` completion tokens in all.

    Attributes:
        input_ids: ``int[rows, length]``.
        positions: ``int[rows, length]``, position within prompt + own completion.
        segments: ``int[rows, length]``, `PROMPT`, completion number + 1, or `PADDING`.
        row: ``int[tokens]``, the row of each completion token, in order group, completion, token.
        source: ``int[tokens]``, the column whose hidden state predicts the token.
        targets: ``int[tokens]``, the token.
    """

    input_ids: Tensor
    positions: Tensor
    segments: Tensor
    row: Tensor
    source: Tensor
    targets: Tensor


def pack_groups(groups: Sequence[Group], device: torch.device | str = "cpu") -> PackedRows:
    """Pack groups, one a row, padded on the right to the longest."""
    rows: list[tuple[list[int], list[int], list[int]]] = []
    row: list[int] = []
    source: list[int] = []
    targets: list[int] = []
    for number, (prompt, completions) in enumerate(groups):
        ids, positions, segments = list(prompt), list(range(len(prompt))), [PROMPT] * len(prompt)
        for k, completion in enumerate(completions):
            if not completion:
                continue
            # The first token is predicted by the shared prompt's last, the others by their own predecessors.
            source += [len(prompt) - 1, *range(len(ids), len(ids) + len(completion) - 1)]
            row += [number] * len(completion)
            targets += completion
            ids += completion[:-1]
            positions += range(len(prompt), len(prompt) + len(completion) - 1)
            segments += [k + 1] * (len(completion) - 1)
        rows.append((ids, positions, segments))
    length = max(len(ids) for ids, _, _ in rows)

    def padded(part: int, value: int) -> Tensor:
        return torch.tensor([r[part] + [value] * (length - len(r[part])) for r in rows], device=device)

    flat = [torch.tensor(values, dtype=torch.long, device=device) for values in (row, source, targets)]
    return PackedRows(padded(0, 0), padded(1, 0), padded(2, PADDING), *flat)


def packed_length(prompt: Sequence[int], completions: Sequence[Sequence[int]]) -> int:
    """Tokens of the row that `pack_groups` makes of one group."""
    return len(prompt) + sum(max(len(completion) - 1, 0) for completion in completions)


def visible(
    query_positions: Tensor, query_segments: Tensor, key_positions: Tensor, key_segments: Tensor, window: int | None
) -> Tensor:
    """Who sees whom: the prompt and the own segment, never later, never farther back than the window.

    The window counts positions, not columns: in a packed row these differ. Padding sees padding, so
    that no row of the softmax is empty; nothing else sees it.

    Args:
        query_positions, query_segments: ``int[rows, queries]``.
        key_positions, key_segments: ``int[rows, keys]``.
        window: number of positions seen, the own included; None sees all.

    Returns:
        ``bool[rows, 1, queries, keys]``.
    """
    query_position, key_position = query_positions[:, :, None], key_positions[:, None, :]
    query_segment, key_segment = query_segments[:, :, None], key_segments[:, None, :]
    seen = ((key_segment == PROMPT) | (key_segment == query_segment)) & (key_position <= query_position)
    if window is not None:
        seen &= query_position - key_position < window
    return seen[:, None]


def attention_masks(
    model: PreTrainedModel,
    query_positions: Tensor,
    query_segments: Tensor,
    key_positions: Tensor,
    key_segments: Tensor,
) -> Tensor | dict[str, Tensor]:
    """`visible` in the form that the model's forward takes.

    transformers uses a four-dimensional mask as it is and then applies no sliding window of its own,
    so the window must be in the mask: one for the whole model (Mistral) or by layer type (Qwen3).
    """
    places = (query_positions, query_segments, key_positions, key_segments)
    window = getattr(model.config, "sliding_window", None)
    layer_types = getattr(model.config, "layer_types", None)
    if layer_types is None:
        return visible(*places, window)
    windows = {"full_attention": None, "sliding_attention": window}
    return {kind: visible(*places, windows[kind]) for kind in sorted(set(layer_types))}
