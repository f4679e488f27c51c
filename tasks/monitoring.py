"""The outside of a stage: who hears its events and who may stop it.

The flow's main thread and an embedded door put their monitors into a context variable; Prefect copies the
context into the thread of every submitted task, where `observed_stage` finds them and adds the run's log
and its MLflow run.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, TypedDict

from prefect import get_run_logger
from prefect.exceptions import MissingContextError

from grpo_core.config import CommonConfig
from grpo_core.progress import Event, Monitor, Monitors, Notice, StepEvent, StopReason
from tasks import tracking

logger = logging.getLogger(__name__)

LOGGED = ("loss", "reward", "kl", "eval/reward")

_watchers: ContextVar[tuple[Monitor, ...]] = ContextVar("watchers", default=())


class JobRef(TypedDict):
    """What a stage knows of the job that it is a part of."""

    id: str
    flow_run_id: str
    mlflow_parent: str | None


@contextmanager
def watching(*monitors: Monitor) -> Iterator[None]:
    """Let `monitors` observe every stage started within."""
    token = _watchers.set((*_watchers.get(), *monitors))
    try:
        yield
    finally:
        _watchers.reset(token)


def announce(message: str) -> None:
    """Warn everything that watches, and the run's log, from outside a stage."""
    Monitors(*map(Guarded, (*_watchers.get(), RunLog()))).emit(Notice("warning", message))


class StopFlag:
    """Asks for a stop once another thread requested one."""

    def __init__(self) -> None:
        self._reason: StopReason | None = None

    def request(self, reason: StopReason) -> None:
        """Ask every stage that sees this flag to stop at its next boundary."""
        self._reason = reason

    def emit(self, event: Event) -> None: ...

    def stop_requested(self) -> StopReason | None:
        return self._reason


class Guarded:
    """A monitor that cannot hurt training: what it raises is logged once, then it hears no more events."""

    def __init__(self, monitor: Monitor):
        self._monitor = monitor
        self._broken = False

    def emit(self, event: Event) -> None:
        if self._broken:
            return
        try:
            self._monitor.emit(event)
        except Exception:
            self._broken = True
            logger.warning("%s fails and hears no more events", type(self._monitor).__name__, exc_info=True)

    def stop_requested(self) -> StopReason | None:
        return self._monitor.stop_requested()


class Named:
    """A monitor that hears the steps of a stage under the name that it has in its job."""

    def __init__(self, name: str, monitor: Monitor):
        self._name = name
        self._monitor = monitor

    def emit(self, event: Event) -> None:
        self._monitor.emit(replace(event, stage=self._name) if isinstance(event, StepEvent) else event)

    def stop_requested(self) -> StopReason | None:
        return self._monitor.stop_requested()


class RunLog:
    """Writes notices and steps to the log of the Prefect run.

    Records of notices carry ``notice``, so that a terminal that shows notices anyway can leave them out.
    """

    def __init__(self) -> None:
        try:
            self._log: logging.Logger | logging.LoggerAdapter[Any] = get_run_logger()
        except MissingContextError:  # the stage's function was called outside a flow
            self._log = logger

    def emit(self, event: Event) -> None:
        if isinstance(event, StepEvent):
            values = "".join(f" {name} {event.metrics[name]:.4g}" for name in LOGGED if name in event.metrics)
            self._log.info("%s %d/%d%s", event.stage, event.step, event.total, values)
        elif isinstance(event, Notice):
            level = logging.WARNING if event.level == "warning" else logging.INFO
            self._log.log(level, event.message, extra={"notice": True})

    def stop_requested(self) -> StopReason | None:
        return None


class ObservedStage:
    """A stage with its monitor and its MLflow run; tell it how the stage ended."""

    def __init__(self, monitor: Monitor, run: tracking.TrackedRun):
        self.monitor = monitor
        self.run = run
        self._status = "FINISHED"

    def cancelled(self) -> None:
        """The stage stopped before its end, as asked."""
        self._status = "KILLED"

    def close(self, failed: bool) -> None:
        """End the stage's MLflow run."""
        self.run.close("FAILED" if failed else self._status)


@contextmanager
def observed_stage(
    name: str, config: CommonConfig, job: JobRef, training_run: str | None = None
) -> Iterator[ObservedStage]:
    """Observe one stage: everything that watches, the run's log, and an MLflow run of its own.

    Args:
        training_run: see `tracking.open_run`.
    """
    run = tracking.open_run(
        name,
        job_id=job["id"],
        parent=job["mlflow_parent"],
        training_run=training_run,
        params=config.model_dump(mode="json"),
        tags={"prefect_flow_run_id": job["flow_run_id"]},
    )
    watchers = (*_watchers.get(), RunLog(), run)
    stage = ObservedStage(Monitors(*map(Guarded, watchers)), run)
    try:
        yield stage
    except BaseException:
        stage.close(failed=True)
        raise
    stage.close(failed=False)
