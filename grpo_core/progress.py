"""What a training loop tells the outside, and the one thing it asks.

A loop takes a `Monitor`. Prefect, MLflow, the terminal, the ceilings and the tests are monitors;
the loop knows none of them. What the metrics are called and mean is in ``docs/metrics.md``.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol


class StopReason(StrEnum):
    """Why a run ended before its last step."""

    CANCELLED = "cancelled"
    TIME_CEILING = "time_ceiling"
    COST_CEILING = "cost_ceiling"
    NO_SIGNAL = "no_signal"


@dataclass(frozen=True)
class StepEvent:
    """One finished step, or one finished batch of an evaluation.

    Attributes:
        stage: ``sft``, ``rl`` or ``eval``.
        step: 1-based number of the step that ended.
        total: number of steps planned.
        metrics: values of this step under the field's names (``loss``, ``reward``, ``kl``, …).
        completions: sampled completions of this step, one flat record each (training on rewards only).
    """

    stage: str
    step: int
    total: int
    metrics: Mapping[str, float]
    completions: Sequence[Mapping[str, Any]] = field(default_factory=tuple)


@dataclass(frozen=True)
class Notice:
    """A message for the person who watches: ``info`` or ``warning``."""

    level: str
    message: str


@dataclass(frozen=True)
class Begun:
    """A training loop is about to do its next step: at a run's beginning, and each time it is resumed.

    Attributes:
        run_id: the same whenever this run is resumed, whatever job and machine does it.
        history: metrics of everything that was emitted up to the step after which the loop goes on, and their ``step``.
    """

    stage: str
    run_id: str
    history: Sequence[Mapping[str, float]]


Event = Begun | StepEvent | Notice


class Monitor(Protocol):
    """The outside of a loop."""

    def emit(self, event: Event) -> None:
        """Receive an event. Must return quickly and must not raise: a monitor cannot stop training."""

    def stop_requested(self) -> StopReason | None:
        """Return a reason when the loop should stop at the next step boundary. Asked often; must be cheap."""


class Silent:
    """A monitor that hears nothing and never stops a run."""

    def emit(self, event: Event) -> None: ...

    def stop_requested(self) -> StopReason | None:
        return None


class Monitors:
    """Several monitors as one; the first reason to stop wins."""

    def __init__(self, *monitors: Monitor):
        self._monitors = monitors

    def emit(self, event: Event) -> None:
        for monitor in self._monitors:
            monitor.emit(event)

    def stop_requested(self) -> StopReason | None:
        for monitor in self._monitors:
            if reason := monitor.stop_requested():
                return reason
        return None


class Deadline:
    """Asks for a stop once `hours` have passed since it was made."""

    def __init__(self, hours: float):
        self._ends_at = time.monotonic() + hours * 3600

    def emit(self, event: Event) -> None: ...

    def stop_requested(self) -> StopReason | None:
        return StopReason.TIME_CEILING if time.monotonic() >= self._ends_at else None


class StopNow(Exception):
    """Raised inside a step when a stop is wanted: the unfinished step is dropped."""

    def __init__(self, reason: StopReason):
        super().__init__(reason.value)
        self.reason = reason


def raise_if_stopping(monitor: Monitor) -> None:
    """Leave an unfinished step when the outside wants a stop (asked between decode steps and micro-batches)."""
    if reason := monitor.stop_requested():
        raise StopNow(reason)
