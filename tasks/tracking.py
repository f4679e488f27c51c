"""MLflow: one run per pipeline, one nested run per stage. The only writer of the tracking store.

Step metrics wait in memory and a thread of their own sends them every few seconds, so that a slow or dead
store neither stalls nor fails training: trouble is logged as a warning, once per run. A run is found again
by its job id and name, so a retried stage goes on where its points ended.
"""

from __future__ import annotations

import json
import logging
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from filelock import FileLock

from grpo_core.home import lab_home
from grpo_core.progress import Event, StepEvent, StopReason

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

logger = logging.getLogger(__name__)

EXPERIMENT = "grpo-lab"
FLUSH_EVERY_S = 5.0
COMPLETIONS = "completions.jsonl"

# Limits of the store (mlflow.utils.validation).
_METRICS_PER_BATCH = 1000
_PARAMS_PER_BATCH = 100
_PARAM_LENGTH = 6000
# What may wait in memory for a store that does not answer: points, and completions.
_KEPT = 100_000

T = TypeVar("T")


def tracking_uri() -> str:
    """``MLFLOW_TRACKING_URI``, or an SQLite store under the lab's home."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{lab_home() / 'mlflow' / 'mlflow.db'}"


def open_run(
    name: str,
    *,
    job_id: str,
    parent: str | None = None,
    params: Mapping[str, Any],
    tags: Mapping[str, str],
    flush_every_s: float = FLUSH_EVERY_S,
) -> TrackedRun:
    """Open the run of one stage or pipeline, or go on with the one that an earlier try opened.

    Never raises: without a store the run has no id and records nothing.
    """
    try:
        client = _client()
        experiment = _experiment(client)
        query = f"tags.job_id = '{job_id}' and tags.stage = '{name}'"
        if found := client.search_runs([experiment], query):
            run_id = found[0].info.run_id
            client.update_run(run_id, status="RUNNING")
            return TrackedRun(client, run_id, experiment, name, flush_every_s, _last_steps(client, run_id))
        nesting = {"mlflow.parentRunId": parent} if parent else {}
        all_tags = {**tags, **nesting, "job_id": job_id, "stage": name}
        run = client.create_run(experiment, run_name=f"{job_id}/{name}" if parent else job_id, tags=all_tags)
        _log_params(client, run.info.run_id, params)
        return TrackedRun(client, run.info.run_id, experiment, name, flush_every_s)
    except Exception as error:
        logger.warning("MLflow cannot be used (%s); %s goes on without it", error, name)
        return TrackedRun(None, None, None, name, flush_every_s)


class TrackedRun:
    """One MLflow run as a monitor: it hears steps, and never raises or stops a run.

    Attributes:
        id: the run's id, or None when there is no store to write to.
    """

    def __init__(
        self,
        client: MlflowClient | None,
        run_id: str | None,
        experiment_id: str | None,
        stage: str,
        flush_every_s: float,
        last_steps: Mapping[str, int] | None = None,
    ):
        self.id = run_id
        self._client = client
        self._experiment_id = experiment_id
        self._stage = stage
        self._last_steps = dict(last_steps or {})
        self._metrics: list[tuple[str, float, int, int]] = []
        self._completions: list[tuple[int, str]] = []
        self._dropped = 0
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._warned = False
        self._thread = threading.Thread(target=self._flush_until_closed, args=(flush_every_s,), daemon=True)
        if client is not None:
            self._thread.start()

    @property
    def link(self) -> str | None:
        """Address of the run's page, where the store is a server."""
        uri = tracking_uri()
        if self.id is None or not uri.startswith("http"):
            return None
        return f"{uri.rstrip('/')}/#/experiments/{self._experiment_id}/runs/{self.id}"

    def emit(self, event: Event) -> None:
        """Keep a step's metrics for the next flush; the progress of an evaluation within training is not kept.

        A point is logged once: the same step of the same metric may come again from a stage that resumed.
        """
        if self.id is None or not isinstance(event, StepEvent) or event.stage != self._stage:
            return
        now_ms = int(time.time() * 1000)
        points = [(key, value, now_ms, event.step) for key, value in self._new(event.metrics, event.step).items()]
        rows = [(event.step, json.dumps({"step": event.step, **row}, ensure_ascii=False)) for row in event.completions]
        with self._lock:
            self._keep(self._metrics, points)
            self._keep(self._completions, rows)

    def stop_requested(self) -> StopReason | None:
        return None

    def record(
        self,
        *,
        metrics: Mapping[str, float],
        tags: Mapping[str, str],
        documents: Mapping[str, Any],
        step: int = 0,
    ) -> None:
        """Write final values: metrics not logged yet, tags, and artifacts by file name (a str is text, else JSON).

        Args:
            step: the step that the metrics are of; 0 where there are no steps.
        """
        new = self._new(metrics, step)
        self._attempt(lambda client, run_id: _record(client, run_id, new, step, tags, documents))

    def close(self, status: str) -> None:
        """Send what waits and end the run with FINISHED, FAILED or KILLED."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()
        self._attempt(self._send_metrics)
        self._attempt(self._send_completions)
        self._attempt(lambda client, run_id: client.set_terminated(run_id, status))
        if lost := self._dropped + len(self._metrics) + len(self._completions):
            logger.warning("%d points and completions of %s were not sent to MLflow", lost, self._stage)

    def _new(self, metrics: Mapping[str, float], step: int) -> dict[str, float]:
        """Those metrics, under the store's names, whose latest point is before `step`; from now on it is at `step`."""
        named = {sanitised(key): float(value) for key, value in metrics.items()}
        new = {key: value for key, value in named.items() if self._last_steps.get(key, -1) < step}
        self._last_steps |= dict.fromkeys(new, step)
        return new

    def _keep(self, waiting: list[T], more: Sequence[T]) -> None:
        """Add as many as there is room for, and count the others."""
        fitting = more[: max(0, _KEPT - len(waiting))]
        waiting += fitting
        self._dropped += len(more) - len(fitting)

    def _flush_until_closed(self, every_s: float) -> None:
        while not self._closing.wait(every_s):
            self._attempt(self._send_metrics)

    def _attempt(self, write: Callable[[MlflowClient, str], T]) -> None:
        if self._client is None or self.id is None:
            return
        try:
            write(self._client, self.id)
        except Exception as error:
            if not self._warned:
                logger.warning(
                    "MLflow does not answer (%s); %s goes on, its points may be incomplete", error, self._stage
                )
            self._warned = True

    def _send_metrics(self, client: MlflowClient, run_id: str) -> None:
        from mlflow.entities import Metric

        while self._metrics:
            batch = self._metrics[:_METRICS_PER_BATCH]
            client.log_batch(run_id, metrics=[Metric(*metric) for metric in batch])
            with self._lock:
                del self._metrics[: len(batch)]

    def _send_completions(self, client: MlflowClient, run_id: str) -> None:
        if not self._completions:
            return
        lines = _earlier_completions(client, run_id)
        last = json.loads(lines[-1])["step"] if lines else -1
        lines += [row for step, row in self._completions if step > last]
        client.log_text(run_id, "\n".join(lines) + "\n", COMPLETIONS)
        self._completions.clear()


def flattened(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested config values as dotted names and text, as MLflow's params are. Fields without a value are left out."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flattened(value, f"{prefix}{key}.")
        elif value is not None:
            yield sanitised(prefix + key), str(value)[:_PARAM_LENGTH]


def sanitised(name: str) -> str:
    """`name` with the characters that MLflow refuses replaced: ``pass@1`` becomes ``pass_1``."""
    return re.sub(r"[^\w\-./: ]", "_", name)


def _client() -> MlflowClient:
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    from mlflow.tracking import MlflowClient

    uri = tracking_uri()
    database = _sqlite_file(uri)
    if database is None:
        return MlflowClient(tracking_uri=uri)
    database.parent.mkdir(parents=True, exist_ok=True)
    # The first client makes the schema, and MLflow lets two of them collide.
    with FileLock(f"{database}.lock", timeout=60):
        client = MlflowClient(tracking_uri=uri)
        client.search_experiments(max_results=1)
        return client


def _sqlite_file(uri: str) -> Path | None:
    return Path(uri.removeprefix("sqlite:///")).absolute() if uri.startswith("sqlite:///") else None


def _experiment(client: MlflowClient) -> str:
    from mlflow.exceptions import MlflowException

    if found := client.get_experiment_by_name(EXPERIMENT):
        return found.experiment_id
    # MLflow's own default is ./mlruns of whichever process came first; artifacts belong beside their database.
    database = _sqlite_file(tracking_uri())
    try:
        return client.create_experiment(
            EXPERIMENT, artifact_location=(database.parent / "artifacts").as_uri() if database else None
        )
    except MlflowException:  # another process made it in between
        if found := client.get_experiment_by_name(EXPERIMENT):
            return found.experiment_id
        raise


def _last_steps(client: MlflowClient, run_id: str) -> dict[str, int]:
    names = client.get_run(run_id).data.metrics
    return {name: max(point.step for point in client.get_metric_history(run_id, name)) for name in names}


def _earlier_completions(client: MlflowClient, run_id: str) -> list[str]:
    if COMPLETIONS not in [item.path for item in client.list_artifacts(run_id)]:
        return []
    with tempfile.TemporaryDirectory() as folder:
        text = Path(client.download_artifacts(run_id, COMPLETIONS, folder)).read_text(encoding="utf-8")
    return text.rstrip("\n").split("\n")  # not splitlines: completions may hold other line separators


def _log_params(client: MlflowClient, run_id: str, values: Mapping[str, Any]) -> None:
    from mlflow.entities import Param

    params = [Param(key, value) for key, value in flattened(values)]
    for start in range(0, len(params), _PARAMS_PER_BATCH):
        client.log_batch(run_id, params=params[start : start + _PARAMS_PER_BATCH])


def _record(
    client: MlflowClient,
    run_id: str,
    metrics: Mapping[str, float],
    step: int,
    tags: Mapping[str, str],
    documents: Mapping[str, Any],
) -> None:
    from mlflow.entities import Metric, RunTag

    now_ms = int(time.time() * 1000)
    client.log_batch(
        run_id,
        metrics=[Metric(key, value, now_ms, step) for key, value in metrics.items()],
        tags=[RunTag(key, value) for key, value in tags.items()],
    )
    for name, document in documents.items():
        text = document if isinstance(document, str) else json.dumps(document, indent=2, ensure_ascii=False)
        client.log_text(run_id, text, name)
