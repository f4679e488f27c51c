"""MLflow runs as monitors: one run per pipeline, one nested run per stage.

Everything is written to a journal on disk first; a thread of its own delivers it every few seconds, so that a slow
or dead store neither stalls nor fails training, and loses nothing: what a job could not deliver, or a killed process
left behind, the next job delivers. A run is found again by its job id and name, or by the training run that it
shows, so that a stage goes on where its points ended, whatever job resumes it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from grpo_core.home import lab_home
from grpo_core.progress import Begun, Event, Notice, StopReason
from tasks.journal import Entry, Journal, left_behind

if TYPE_CHECKING:
    from tasks.mlflow_store import MlflowStore, OpenRun, Point

logger = logging.getLogger(__name__)

DELIVER_EVERY_S = 5.0
_ENTRIES_PER_BATCH = 1000


def tracking_uri() -> str:
    """``MLFLOW_TRACKING_URI``, or an SQLite store under the lab's home."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{lab_home() / 'mlflow' / 'mlflow.db'}"


def open_run(
    name: str,
    *,
    job_id: str,
    parent: str | None = None,
    training_run: str | None = None,
    params: Mapping[str, Any],
    tags: Mapping[str, str],
    deliver_every_s: float = DELIVER_EVERY_S,
) -> TrackedRun:
    """Open the run of one stage or pipeline, or go on with the one that an earlier try opened.

    Never raises for the store's sake: while there is none, the run has no id.

    Args:
        parent: id of the run in which this one is nested; an earlier try's moves there.
        training_run: `Manifest.run_id` of the checkpoints that a training stage goes on from.
    """
    deliver_left_behind()
    journal = Journal.begin(f"{job_id}-{name}")
    opening = {"name": name, "job_id": job_id, "parent": parent, "training_run": training_run}
    journal.append({"uri": tracking_uri(), "open": {**opening, "params": dict(params), "tags": dict(tags)}})
    return TrackedRun(name, journal, deliver_every_s)


def deliver_left_behind() -> None:
    """Deliver the journals of processes that are gone; a run whose process was killed ends as FAILED."""
    with left_behind() as journals:
        for journal in journals:
            try:
                Delivery(journal).finish()
            except Exception as error:
                logger.warning("%s could not be delivered to MLflow (%s); it is tried again", journal.path, error)


class Delivery:
    """Takes one journal's entries to the store; what fails is delivered again, and twice does no harm."""

    def __init__(self, journal: Journal):
        self.run: OpenRun | None = None
        self._journal = journal
        self._store: MlflowStore | None = None
        self._offset = 0

    def drain(self) -> None:
        """Deliver what was not delivered yet.

        Raises:
            Exception: whatever the store answered.
        """
        entries: list[Entry] = []
        offset = self._offset
        for entry, offset in self._journal.entries(self._offset):
            entries.append(entry)
            if len(entries) == _ENTRIES_PER_BATCH:
                self._deliver(entries)
                self._offset, entries = offset, []
        self._deliver(entries)
        self._offset = offset

    def finish(self) -> None:
        """Deliver all, end the run as its journal says, and delete the journal; a run whose journal ends early failed.

        Raises:
            Exception: whatever the store answered.
        """
        self.drain()
        status, completions = "FAILED", list[dict[str, Any]]()
        for entry, _ in self._journal.entries():
            status = entry.get("close", status)
            completions += entry.get("completions", ())
        if self.run is not None:  # else the process was killed before it had said what run it opens
            assert self._store is not None
            self._store.send_completions(self.run, completions)
            self._store.close(self.run, status)
        self._journal.remove()

    def _deliver(self, entries: list[Entry]) -> None:
        points: list[Point] = []
        for entry in entries:
            if "open" in entry:
                self._open(entry)
            points += [tuple(point) for point in entry.get("points", ())]
            if "record" in entry:
                assert self._store is not None and self.run is not None
                self._store.record(self.run, **entry["record"])
        if points:
            assert self._store is not None and self.run is not None
            self._store.send_points(self.run, points)

    def _open(self, entry: Entry) -> None:
        if self.run is None:
            from tasks.mlflow_store import MlflowStore  # seconds

            self._store = MlflowStore(entry["uri"])
            self.run = self._store.open(**entry["open"])


class TrackedRun:
    """One MLflow run as a monitor: it hears steps, and never raises or stops a run for the store's sake."""

    def __init__(self, stage: str, journal: Journal, deliver_every_s: float):
        self._stage = stage
        self._journal = journal
        self._delivery = Delivery(journal)
        self._closing = threading.Event()
        self._warned = self._full = False
        self._attempt(self._delivery.drain)
        self._thread = threading.Thread(target=self._deliver_until_closed, args=(deliver_every_s,), daemon=True)
        self._thread.start()

    @property
    def id(self) -> str | None:
        """The run's id; None while no store has answered."""
        return self._delivery.run.id if self._delivery.run else None

    @property
    def link(self) -> str | None:
        """Address of the run's page, where the store is a server."""
        run, uri = self._delivery.run, tracking_uri()
        if run is None or not uri.startswith("http"):
            return None
        return f"{uri.rstrip('/')}/#/experiments/{run.experiment_id}/runs/{run.id}"

    def emit(self, event: Event) -> None:
        """Keep a step's metrics; the progress of an evaluation within training is not kept.

        A point is logged once: the same step of the same metric may come again from a stage that resumed.
        """
        if isinstance(event, Notice) or event.stage != self._stage:
            return
        if isinstance(event, Begun):
            for row in event.history:
                self._keep({key: value for key, value in row.items() if key != "step"}, int(row["step"]))
            self._append({"record": {"tags": {"training_run": event.run_id}, "documents": {}}})
        else:
            rows = [{"step": event.step, **row} for row in event.completions]
            self._keep(event.metrics, event.step, completions=rows)

    def stop_requested(self) -> StopReason | None:
        return None

    def record(
        self, *, metrics: Mapping[str, float], tags: Mapping[str, str], documents: Mapping[str, Any], step: int = 0
    ) -> None:
        """Write final values: metrics not logged yet, tags, and artifacts by file name (a str is text, else JSON).

        Args:
            step: the step that the metrics are of; 0 where there are no steps.
        """
        self._keep(metrics, step, record={"tags": dict(tags), "documents": dict(documents)})

    def close(self, status: str) -> None:
        """Deliver what waits and end the run with FINISHED, FAILED or KILLED."""
        self._closing.set()
        self._thread.join()
        self._append({"close": status})
        self._attempt(self._delivery.finish)
        if self._journal.path.exists():
            logger.warning("%s was not delivered to MLflow: the next job tries again", self._journal.path)

    def _keep(self, metrics: Mapping[str, float], step: int, **more: Any) -> None:
        now_ms = int(time.time() * 1000)
        self._append({"points": [(key, float(value), now_ms, step) for key, value in metrics.items()], **more})

    def _append(self, entry: Entry) -> None:
        try:
            self._journal.append(entry)
        except OSError as error:
            if not self._full:
                logger.warning("MLflow will lack points of %s: %s", self._stage, error)
            self._full = True

    def _deliver_until_closed(self, every_s: float) -> None:
        while not self._closing.wait(every_s):
            self._attempt(self._delivery.drain)

    def _attempt(self, deliver: Callable[[], None]) -> None:
        try:
            deliver()
        except Exception as error:
            if not self._warned:
                logger.warning("MLflow does not answer (%s); %s goes on, and its points wait", error, self._stage)
            self._warned = True
