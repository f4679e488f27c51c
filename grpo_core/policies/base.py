"""The policy protocol: all that sampler, trainer and evaluation know of what is trained.

The loops hold no question about the kind of policy: a LoRA policy gives one adapter for all
problems, a hypernetwork one for each, and a bare model none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol

from torch import Tensor

from grpo_core.chat import Messages, document_and_question
from grpo_core.environments.base import Problem
from grpo_core.models import BaseModel
from grpo_core.policies.adapters import NO_ADAPTER, AdapterBatch


class Policy(Protocol):
    """Something that answers problems: a base model and the adapters to apply to it."""

    kind: str
    base: BaseModel

    def render(self, problem: Problem) -> Messages:
        """What the model sees: document and question, or the question alone."""
        ...

    def adapters(self, problems: Sequence[Problem]) -> AdapterBatch:
        """Adapters for these problems: one for all of them, or one for each, in order."""
        ...


class TrainablePolicy(Policy, Protocol):
    """A policy that a training loop can change and save."""

    def leaf_adapters(self, problems: Sequence[Problem]) -> AdapterBatch:
        """Like `adapters`, as autograd leaves that collect gradients until `backward`."""
        ...

    def set_reference(self, reference: Literal["init", "base"], initial: Path) -> None:
        """Choose the frozen reference: the policy saved in the folder `initial`, or the bare model."""
        ...

    def reference_adapters(self, problems: Sequence[Problem]) -> AdapterBatch:
        """Adapters of the frozen reference policy that the KL refers to."""
        ...

    def backward(self, leaves: AdapterBatch) -> None:
        """Add the gradients of one `leaf_adapters` batch to those of the policy's own parameters."""
        ...

    def trainable_parameters(self) -> Mapping[str, Tensor]:
        """Parameters by name, fp32."""
        ...

    def save(self, folder: Path) -> None:
        """Write the checkpoint files of this kind of policy into a local folder."""
        ...

    def restore(self, folder: Path) -> None:
        """Take the weights that `save` wrote; kind, layers and rank must be the same."""
        ...


class BarePolicy:
    """The family as it is: evaluation only."""

    kind = "base"

    def __init__(self, base: BaseModel):
        self.base = base

    def render(self, problem: Problem) -> Messages:
        """Document and question."""
        return document_and_question(problem)

    def adapters(self, problems: Sequence[Problem]) -> AdapterBatch:
        """None."""
        return NO_ADAPTER


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes: equal exactly when the tensors are."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(tensor.view(-1).numpy().tobytes())
    return digest.hexdigest()
