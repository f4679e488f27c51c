"""What an environment is: problems that come from addresses, and a verifiable reward.

Subclass `Environment`, name the class under the entry-point group ``grpo_lab.environments``, and
every job accepts it by name. Nothing here needs torch.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import ConfigDict

from grpo_core.validation import StrictNumbers

T = TypeVar("T")
Split = Literal["train", "validation", "eval"]


@dataclass(frozen=True)
class Problem:
    """One problem.

    Attributes:
        id: stable name, equal exactly when the problem is the same.
        document: text that the question is about, or None where there is none.
        question: what is asked.
        answer: the reference answer, as a perfect completion would give it.
        metadata: JSON-ready facts shown beside results (for niah: ``depth`` in [0, 1], ``blocks``).
    """

    id: str
    split: Split
    seed: int
    index: int
    document: str | None
    question: str
    answer: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Score:
    """What one completion earned: the reward and the parts that are shown beside it."""

    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)


class EnvironmentOptions(StrictNumbers):
    """Base of an environment's own options; an unknown option is refused by name."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Environment(ABC):
    """A source of problems with a verifiable reward.

    Class attributes are the defaults that jobs take when their own field is not set.
    """

    name: ClassVar[str]
    description: ClassVar[str]
    Options: ClassVar[type[EnvironmentOptions]] = EnvironmentOptions
    part_names: ClassVar[tuple[str, ...]] = ()
    reward_range: ClassVar[tuple[float, float]] = (0.0, 1.0)
    pass_threshold: ClassVar[float] = 1.0
    max_new_tokens: ClassVar[int] = 64

    def __init__(self, options: EnvironmentOptions):
        self.options = options

    @abstractmethod
    def problem(self, seed: int, split: Split, index: int, stream: str = "") -> Problem:
        """The problem at this address: the same on every machine, whatever was asked before.

        `stream` separates draws inside one split (SFT and RL read different streams of ``train``).
        """

    @abstractmethod
    def score(self, problem: Problem, completion: str) -> Score:
        """Score one completion. A raised error or a reward outside `reward_range` makes the item invalid."""

    def problems(self, seed: int, split: Split, count: int, stream: str = "", start: int = 0) -> list[Problem]:
        """`count` problems from consecutive addresses."""
        return [self.problem(seed, split, index, stream) for index in range(start, start + count)]

    def checked_score(self, problem: Problem, completion: str) -> Score | str:
        """Score one completion, or say why it could not be scored.

        Returns:
            The score, or an error message when `score` raised or gave a reward that is not a finite
            number within `reward_range`. An unscored item is never silently a zero or left out.
        """
        low, high = self.reward_range
        try:
            score = self.score(problem, completion)
            for name, value in (("reward", score.reward), *score.parts.items()):
                if not math.isfinite(value):
                    return f"{name} {value!r} is not a finite number"
            if not low <= score.reward <= high:
                return f"reward {score.reward!r} is not in [{low}, {high}]"
        except Exception as error:  # an environment is foreign code: any error makes this one item invalid
            return f"{type(error).__name__}: {error}"
        return score


class Draws:
    """Uniform draws from an address, equal on every machine and in every Python version.

    The n-th draw is the first 53 bits of SHA-256 over the address and n.
    """

    def __init__(self, *address: str | int):
        self._prefix = "\x1f".join(str(part) for part in address).encode()
        self._count = 0

    def uniform(self) -> float:
        """A number in [0, 1)."""
        digest = hashlib.sha256(self._prefix + b"\x1e" + str(self._count).encode()).digest()
        self._count += 1
        return (int.from_bytes(digest[:8], "big") >> 11) / (1 << 53)

    def integer(self, low: int, high: int) -> int:
        """An integer in [low, high], both ends included."""
        return low + int(self.uniform() * (high - low + 1))

    def choice(self, items: Sequence[T]) -> T:
        """One of the items."""
        return items[self.integer(0, len(items) - 1)]
