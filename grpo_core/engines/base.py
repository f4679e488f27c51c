"""What sampler and losses ask of an engine: hidden states, never logits or probabilities.

Every engine computes a group's prompt once and shares it with the group's completions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from grpo_core.packing import Group
from grpo_core.policies.adapters import AdapterBatch


@dataclass(frozen=True)
class Prefill:
    """Prompts that an engine has computed under some adapters.

    Attributes:
        prompts: token ids. adapters: one for all prompts or one for each.
        state: what the engine keeps of them; the gradients' graph too where they were computed with gradients.
    """

    prompts: Sequence[Sequence[int]]
    adapters: AdapterBatch
    state: Any


class Decoding(Protocol):
    """Rows of completions that grow token by token; rows are ordered by prompt.

    Attributes:
        hidden: ``float[rows, d_model]``, the states that predict each row's next token.
    """

    hidden: Tensor

    def keep(self, places: Tensor) -> None:
        """Go on with these rows alone: ``int[kept]``, ascending."""
        ...

    def step(self, tokens: Tensor) -> None:
        """Append ``int[rows]`` tokens; `hidden` then predicts the ones after them."""
        ...


class Engine(Protocol):
    """A base model's decoder, from token ids to hidden states.

    Attributes:
        name: tells engines apart in a checkpoint's numeric layout.
        shares_prompts: whether groups share their prompt's computation (1.0 in the metric ``fast_path``).
    """

    name: str
    shares_prompts: bool

    def prefill(self, prompts: Sequence[Sequence[int]], adapters: AdapterBatch) -> Prefill:
        """Compute prompts, each once; with gradients where they are switched on."""
        ...

    def decoding(self, prefill: Prefill, group: int) -> Decoding:
        """Start `group` rows on each prompt; without gradients."""
        ...

    def predicting(self, groups: Sequence[Group], prefill: Prefill | None = None) -> Tensor:
        """The states that predict every completion token, under the adapters applied at the moment.

        Args:
            prefill: the groups' prompts, computed under these same adapters: they are not computed again.

        Returns:
            ``float[tokens, d_model]`` in order group, completion, token; differentiable.
        """
        ...

    def enable_gradient_checkpointing(self) -> None:
        """Recompute activations in the backward pass instead of keeping them."""
        ...
