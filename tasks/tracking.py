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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from grpo_core.home import lab_home
from grpo_core.progress import Begun, Event, Notice, StopReason
from tasks.journal import Entry, Journal, delivering, left_behind

if TYPE_CHECKING:
    from tasks.mlflow_store import MlflowStore, OpenRun, Point

logger = logging.getLogger(__name__)

DELIVER_EVERY_S = 5.0
_ENTRIES_PER_BATCH = 1000

# How long a store that hangs, or is busy with much that was left behind, may hold up a stage's beginning and end.
_OPEN_WAIT_S = 30.0
_CLOSE_WAIT_S = 30.0
_ROUND_S = 10.0


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

    Never raises: while there is no store, the run has no id, and what a full disk does not take is missing there.

    Args:
        parent: name of the run of the same job in which this one is nested; an earlier try's moves there.
        training_run: `Manifest.run_id` of the checkpoints that a training stage goes on from.
    """
    opening = {"name": name, "job_id": job_id, "parent": parent, "training_run": training_run}
    opening |= {"params": dict(params), "tags": dict(tags), "began_ms": int(time.time() * 1000)}
    return TrackedRun(
        name, Journal.begin(f"{job_id}-{name}", {"uri": tracking_uri(), "open": opening}), deliver_every_s
    )


def deliver_left_behind(within_s: float = _ROUND_S) -> None:
    """Deliver the journals of processes that are gone; a run whose process was killed ends as FAILED.

    Safe in any thread and beside running jobs, and a look into a folder where nothing was left. A store that does
    not answer is asked once and its journals wait, as do those that a round of `within_s` does not begin with.
    """
    ends_at = time.monotonic() + within_s
    stores: dict[str, MlflowStore | None] = {}
    for journal in left_behind():
        uri = journal.header["uri"]
        if uri not in stores:
            stores[uri] = _connected(uri)
        if (store := stores[uri]) is not None:
            try:
                Delivery(journal, store).finish()
            except Exception as error:
                logger.warning("%s could not be delivered to MLflow (%s); it is tried again", journal.path, error)
        if time.monotonic() > ends_at:
            return


def _connected(uri: str) -> MlflowStore | None:
    from tasks.mlflow_store import MlflowStore  # seconds

    try:
        return MlflowStore(uri)
    except Exception as error:
        logger.info("%s does not answer (%s); what was left for it waits", uri, error)
        return None


class Delivery:
    """Takes one journal's entries to the store; what fails is delivered again, and twice does no harm.

    Attributes:
        run: what it was at the latest opening; None before.
    """

    def __init__(self, journal: Journal, store: MlflowStore | None = None):
        self.run: OpenRun | None = None
        self._journal = journal
        self._store = store
        self._failed = False
        self._offset = 0

    def drain(self) -> None:
        """Deliver what was not delivered yet.

        Raises:
            Exception: whatever the store answered.
        """
        with self._opened() as run:
            if run is not None:
                self._drain(run)

    def finish(self) -> None:
        """Deliver all, end the run as its journal says, and delete the journal; a run whose journal ends early failed.

        Raises:
            Exception: whatever the store answered.
        """
        with self._opened() as run:
            if run is None:
                return
            self._drain(run)
            status, completions = "FAILED", list[dict[str, Any]]()
            for entry, _ in self._journal.entries():
                status = entry.get("close", status)
                completions += entry.get("completions", ())
            run.send_completions(completions)
            run.close(status, self._journal.ended_ms())
            self._journal.remove()

    @contextmanager
    def _opened(self) -> Iterator[OpenRun | None]:
        """The run; None where nothing can be delivered now, or somebody else has delivered it all."""
        uri, opening = self._journal.header["uri"], self._journal.header["open"]
        with delivering(uri):
            if not self._journal.path.exists():
                yield None
                return
            try:
                if self.run is None or self._failed:
                    from tasks.mlflow_store import MlflowStore  # seconds

                    store = self._store or MlflowStore(uri)
                    self.run = store.open(**{**opening, "training_run": self._training_run()})
                self._failed = False
                yield self.run
            except Exception:
                self._failed = True
                raise

    def _training_run(self) -> str | None:
        """The training run that a later job may have gone on with by now, and so the one by which its run is found."""
        records = (entry["record"]["tags"] for entry, _ in self._journal.entries() if "record" in entry)
        begun = (tags["training_run"] for tags in records if "training_run" in tags)
        return next(begun, self._journal.header["open"]["training_run"])

    def _drain(self, run: OpenRun) -> None:
        entries: list[Entry] = []
        offset = self._offset
        for entry, offset in self._journal.entries(self._offset):
            entries.append(entry)
            if len(entries) == _ENTRIES_PER_BATCH:
                _send(run, entries)
                self._offset, entries = offset, []
        _send(run, entries)
        self._offset = offset


def _send(run: OpenRun, entries: list[Entry]) -> None:
    points: list[Point] = []
    for entry in entries:
        points += [tuple(point) for point in entry.get("points", ())]
        if "record" in entry:
            run.record(**entry["record"])
    run.send_points(points)


class TrackedRun:
    """One MLflow run as a monitor: it hears steps, and never raises or stops a run for the store's sake."""

    def __init__(self, stage: str, journal: Journal, deliver_every_s: float):
        self._stage = stage
        self._journal = journal
        self._delivery = Delivery(journal)
        self._tried, self._closing = threading.Event(), threading.Event()
        self._warned = self._full = False
        self._append()
        self._thread = threading.Thread(target=self._deliver, args=(deliver_every_s,), daemon=True)
        self._thread.start()
        self._tried.wait(_OPEN_WAIT_S)  # also so that MLflow is not imported beside other heavy things

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
        self._append({"close": status})
        self._closing.set()
        self._thread.join(_CLOSE_WAIT_S)
        if self._journal.path.exists():
            logger.warning("%s was not delivered to MLflow: the next job tries again", self._journal.path)

    def _keep(self, metrics: Mapping[str, float], step: int, **more: Any) -> None:
        now_ms = int(time.time() * 1000)
        self._append({"points": [(key, float(value), now_ms, step) for key, value in metrics.items()], **more})

    def _append(self, *entries: Entry) -> None:
        try:
            self._journal.append(*entries)
        except OSError as error:
            if not self._full:
                logger.warning("MLflow will lack points of %s: %s", self._stage, error)
            self._full = True

    def _deliver(self, every_s: float) -> None:
        """The thread: first what earlier attempts left, so that a resumed run's points come in their order."""
        self._attempt(deliver_left_behind)
        self._attempt(self._delivery.drain)
        self._tried.set()
        while not self._closing.wait(every_s):
            self._attempt(self._delivery.drain)
        self._attempt(self._delivery.finish)
        if not self._journal.path.exists():  # what waited for the end of this attempt
            self._attempt(deliver_left_behind)

    def _attempt(self, deliver: Callable[[], None]) -> None:
        try:
            deliver()
        except Exception as error:
            if not self._warned:
                logger.warning("MLflow does not answer (%s); %s goes on, and its points wait", error, self._stage)
            self._warned = True
