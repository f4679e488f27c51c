"""The progress of a job on standard error: bars on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from grpo_core.progress import Event, Notice, StepEvent, StopReason

LINE_EVERY_S = 15.0
SHOWN = ("loss", "reward", "eval/reward")


class _Rate(ProgressColumn):
    """Steps per minute, which suits steps of seconds."""

    def render(self, task: Task) -> Text:
        return Text(f"{task.speed * 60:.1f}/min" if task.speed else "", style="dim")


class TerminalProgress:
    """A monitor that shows each stage's step, rate, last values and the time left.

    On a terminal it is a live display, to be used as a context manager; elsewhere lines are printed at
    most every `line_every_s` seconds, and at a stage's first, last and validated steps.
    """

    def __init__(self, console: Console | None = None, line_every_s: float = LINE_EVERY_S):
        self._console = console or Console(stderr=True)
        self._line_every_s = line_every_s
        self._printed_at = 0.0
        self._stages: dict[str, TaskID] = {}
        self._stage = ""
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            _Rate(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[values]}"),
        )
        self._display = Progress(*columns, console=self._console)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._display.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._display.stop()

    def emit(self, event: Event) -> None:
        """Show an event."""
        if isinstance(event, Notice):
            self._say(f"{event.level}: {event.message}")
        elif isinstance(event, StepEvent):
            (self._advance if self._console.is_terminal else self._print)(event)

    def stop_requested(self) -> StopReason | None:
        return None

    def _advance(self, event: StepEvent) -> None:
        if event.stage not in self._stages:
            self._stages[event.stage] = self._display.add_task(event.stage, total=event.total, values="")
        elif event.step == 1:  # an evaluation within training comes several times
            self._display.reset(self._stages[event.stage])
        self._display.update(self._stages[event.stage], completed=event.step, total=event.total, values=_values(event))

    def _print(self, event: StepEvent) -> None:
        now = time.monotonic()
        rare = event.stage != self._stage or event.step == event.total or "eval/reward" in event.metrics
        if not rare and now - self._printed_at < self._line_every_s:
            return
        self._stage, self._printed_at = event.stage, now
        self._say(f"{event.stage} {event.step}/{event.total} {_values(event)}".rstrip())

    def _say(self, line: str) -> None:
        self._console.print(Text(line), soft_wrap=True)


def _values(event: StepEvent) -> str:
    return " ".join(f"{name} {event.metrics[name]:.4g}" for name in SHOWN if name in event.metrics)
