"""The engine of Llama, Mistral and Qwen3: flat tokens, no padding, every prompt computed once.

Prompts come first; completions then attend to their keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from grpo_core.engines.base import Prefill
from grpo_core.engines.blocks import completion_blocks, last_token_blocks, prompt_blocks, spans
from grpo_core.engines.decoder import Adapters, Decoder, Hidden
from grpo_core.engines.decoding import NativeDecoding
from grpo_core.engines.functions import BlockAttention, apply
from grpo_core.packing import Group
from grpo_core.policies.adapters import AdapterBatch, applied

PREFILL_TOKENS = 4096
"""Prompt tokens that are prefilled together when sampling."""


class NativeEngine:
    """See `base.Engine`."""

    name = "native"
    shares_prompts = True

    def __init__(self, model: PreTrainedModel):
        self._model = model
        self._decoder = Decoder(model)

    def enable_gradient_checkpointing(self) -> None:
        """See `base.Engine`."""
        self._decoder.gradient_checkpointing = True

    def prefill(self, prompts: Sequence[Sequence[int]], adapters: AdapterBatch) -> Prefill:
        """See `base.Engine`."""
        with applied(self._model, adapters):
            joined = self._decoder.adapters()
        passes = []
        for batch in _batches(prompts):
            served = [[pair and _of(pair, batch) for pair in layer] for layer in joined]
            passes.append(self._prompts(prompts[batch], served))
        return Prefill(prompts, adapters, (_together(passes), joined))

    def decoding(self, prefill: Prefill, group: int) -> NativeDecoding:
        """See `base.Engine`."""
        hidden, adapters = prefill.state
        return NativeDecoding(self._decoder, [len(prompt) for prompt in prefill.prompts], hidden, adapters, group)

    def predicting(self, groups: Sequence[Group], prefill: Prefill | None = None) -> Tensor:
        """See `base.Engine`."""
        prompts = [prompt for prompt, _ in groups]
        if prefill is None:
            adapters = self._decoder.adapters()
            prefix = self._prompts(prompts, adapters)
        else:
            prefix, adapters = prefill.state
        # the last token of a completion predicts nothing
        fed = [[completion[:-1] for completion in completions] for _, completions in groups]
        states = [prefix.states]
        if any(completion for completions in fed for completion in completions):
            states.append(self._completions(prompts, prefix, fed, adapters))
        return torch.cat(states)[self._ids(_sources(groups))]

    def _prompts(self, prompts: Sequence[Sequence[int]], adapters: Adapters) -> Hidden:
        """Keys and values of prompts; of the last layer only each prompt's last token goes on."""
        lengths = [len(prompt) for prompt in prompts]
        rows, windows, like = spans(lengths), self._decoder.windows, self._decoder.weights
        blocks = {window: prompt_blocks(lengths, window, like) for window in set(windows)}
        closing = last_token_blocks(lengths, windows[-1], like)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            chosen = closing if layer == len(windows) - 1 else blocks[windows[layer]]
            return apply(BlockAttention, q, k, v, k[:0], v[:0], chosen)  # type: ignore[no-any-return]

        ids = self._ids([token for prompt in prompts for token in prompt])
        positions = self._ids([i for n in lengths for i in range(n)])
        ends = self._ids([span.stop - 1 for span in rows])
        return self._decoder(ids, positions, adapters, rows, attend, ends)

    def _completions(
        self,
        prompts: Sequence[Sequence[int]],
        prefix: Hidden,
        completions: Sequence[Sequence[Sequence[int]]],
        adapters: Adapters,
    ) -> Tensor:
        """States of all tokens of the completions, in order group, completion, token."""
        begins = [len(prompt) for prompt in prompts]
        lengths = [[len(completion) for completion in group] for group in completions]
        windows, like = self._decoder.windows, self._decoder.weights
        blocks = {window: completion_blocks(begins, lengths, window, like) for window in set(windows)}

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            before = prefix.keys[layer], prefix.values[layer]
            return apply(BlockAttention, q, k, v, *before, blocks[windows[layer]])  # type: ignore[no-any-return]

        ids = self._ids([token for group in completions for completion in group for token in completion])
        positions = self._ids(
            [begin + i for begin, group in zip(begins, lengths, strict=True) for count in group for i in range(count)]
        )
        return self._decoder(ids, positions, adapters, spans([sum(group) for group in lengths]), attend).states

    def _ids(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self._decoder.weights.device)


def _sources(groups: Sequence[Group]) -> list[int]:
    """Where the state that predicts each completion token lies: first one a prompt, then the completions' tokens."""
    sources, row = list[int](), len(groups)
    for number, (_, completions) in enumerate(groups):
        for completion in completions:
            if completion:
                sources += [number, *range(row, row + len(completion) - 1)]
                row += len(completion) - 1
    return sources


def _batches(prompts: Sequence[Sequence[int]]) -> list[slice]:
    """Consecutive prompts of at most `PREFILL_TOKENS` together, at least one."""
    batches, begin, tokens = list[slice](), 0, 0
    for number, prompt in enumerate(prompts):
        if number > begin and tokens + len(prompt) > PREFILL_TOKENS:
            batches.append(slice(begin, number))
            begin, tokens = number, 0
        tokens += len(prompt)
    return [*batches, slice(begin, len(prompts))]


def _together(passes: Sequence[Hidden]) -> Hidden:
    """Prompts of several passes, flat behind one another."""
    if len(passes) == 1:
        return passes[0]
    return Hidden(
        torch.cat([part.states for part in passes]),
        [torch.cat(keys) for keys in zip(*(part.keys for part in passes), strict=True)],
        [torch.cat(values) for values in zip(*(part.values for part in passes), strict=True)],
    )


def _of(pair: tuple[Tensor, Tensor], batch: slice) -> tuple[Tensor, Tensor]:
    """The adapters of these prompts; a single one serves all."""
    a, b = pair
    return pair if len(a) == 1 else (a[batch], b[batch])
