"""The MLflow tracking store: the one module that talks to it. All calls may raise; `tracking.py` decides what then."""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock
from mlflow.entities import Metric, Param, Run, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

EXPERIMENT = "grpo-lab"
COMPLETIONS = "completions.jsonl"

# Tags of a run.
PARENT = "mlflow.parentRunId"
BEGAN = "began_ms"
"""When the attempt began that the run shows: a later one goes on in it, whatever an earlier one has still to say."""

# Limits of the store (mlflow.utils.validation).
_METRICS_PER_BATCH = 1000
_PARAMS_PER_BATCH = 100
_PARAM_LENGTH = 6000

Point = tuple[str, float, int, int]
"""Name, value, time in milliseconds, step."""


class MlflowStore:
    """A tracking store, connected."""

    def __init__(self, uri: str):
        # What fails is delivered again in a few seconds anyway; waiting within a call would only hold up its caller.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        self._database = _sqlite_file(uri)
        if self._database is None:
            self._client = MlflowClient(tracking_uri=uri)
        else:
            self._database.parent.mkdir(parents=True, exist_ok=True)
            # The first client makes the schema, and MLflow lets two of them collide.
            with FileLock(f"{self._database}.lock", timeout=60):
                self._client = MlflowClient(tracking_uri=uri)
                self._client.search_experiments(max_results=1)
        self._experiment = self._find_experiment()

    def open(
        self,
        name: str,
        job_id: str,
        parent: str | None,
        training_run: str | None,
        params: Mapping[str, Any],
        tags: Mapping[str, str],
        began_ms: int,
    ) -> OpenRun | None:
        """The run of one attempt of a stage or pipeline: a new one, or an earlier try's, as `tracking.open_run` says.

        An attempt that began before the one that the run shows by now only adds what the run lacks.

        Returns:
            None while such a later attempt is under way: two that write at once could log a point twice.
        """
        queries = [_of_stage(job_id, name)]
        if training_run is not None:
            queries.append(f"tags.training_run = '{training_run}'")
        run = next(filter(None, map(self._find, queries)), None)
        if run is None:
            run_name = f"{job_id}/{name}" if parent else job_id
            run = self._create(run_name, {"job_id": job_id, "stage": name}, began_ms)
        if int(run.data.tags.get(BEGAN, 0)) <= began_ms:
            nesting = {PARENT: self._parent(job_id, parent)} if parent else {}
            self._client.update_run(run.info.run_id, status="RUNNING")
            self._tag(run, {**tags, **nesting, "job_id": job_id, "stage": name, BEGAN: str(began_ms)})
            self._add_params(run, params)
        elif run.info.status == "RUNNING":
            return None
        return OpenRun(self._client, run, began_ms)

    def _find_experiment(self) -> str:
        if found := self._client.get_experiment_by_name(EXPERIMENT):
            return found.experiment_id
        # MLflow's own default is ./mlruns of whichever process came first; artifacts belong beside their database.
        location = (self._database.parent / "artifacts").as_uri() if self._database else None
        try:
            return self._client.create_experiment(EXPERIMENT, artifact_location=location)
        except MlflowException:  # another process made it in between
            if found := self._client.get_experiment_by_name(EXPERIMENT):
                return found.experiment_id
            raise

    def _find(self, query: str) -> Run | None:
        found = self._client.search_runs([self._experiment], query, max_results=1)
        return found[0] if found else None

    def _create(self, name: str, tags: dict[str, str], began_ms: int) -> Run:
        return self._client.create_run(self._experiment, run_name=name, tags=tags, start_time=began_ms)

    def _parent(self, job_id: str, name: str) -> str:
        """Id of the run in which a stage is nested; where its own journal was not delivered yet, a run for it."""
        now_ms = int(time.time() * 1000)
        run = self._find(_of_stage(job_id, name)) or self._create(job_id, {"job_id": job_id, "stage": name}, now_ms)
        return run.info.run_id

    def _tag(self, run: Run, tags: Mapping[str, str]) -> None:
        self._client.log_batch(run.info.run_id, tags=[RunTag(key, value) for key, value in tags.items()])

    def _add_params(self, run: Run, params: Mapping[str, Any]) -> None:
        """Log those that the run lacks: the store never changes a param."""
        missing = [Param(key, value) for key, value in flattened(params) if key not in run.data.params]
        for start in range(0, len(missing), _PARAMS_PER_BATCH):
            self._client.log_batch(run.info.run_id, params=missing[start : start + _PARAMS_PER_BATCH])


class OpenRun:
    """A run that one attempt writes. After a failure open it anew: what the store took of it is unknown."""

    def __init__(self, client: MlflowClient, run: Run, began_ms: int):
        self.id: str = run.info.run_id
        self.experiment_id: str = run.info.experiment_id
        self._client = client
        self._began_ms = began_ms
        self._logged = {
            name: {point.step for point in client.get_metric_history(self.id, name)} for name in run.data.metrics
        }

    def send_points(self, points: Sequence[Point]) -> None:
        """Send those points that the run lacks: a metric has one of each step."""
        missing = list[Metric]()
        for key, value, time_ms, step in points:
            name = sanitised(key)
            logged = self._logged.setdefault(name, set())
            if step not in logged:
                logged.add(step)
                missing.append(Metric(name, value, time_ms, step))
        for start in range(0, len(missing), _METRICS_PER_BATCH):
            self._client.log_batch(self.id, metrics=missing[start : start + _METRICS_PER_BATCH])

    def send_completions(self, rows: Sequence[dict[str, Any]]) -> None:
        """Add the completions of those steps that the run's table lacks."""
        table = self._completions()
        known = {row["step"] for row in table}
        if missing := [row for row in rows if row["step"] not in known]:
            table = sorted([*table, *missing], key=lambda row: row["step"])
            lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in table]
            self._client.log_text(self.id, "".join(lines), COMPLETIONS)

    def record(self, tags: Mapping[str, str], documents: Mapping[str, Any]) -> None:
        """Write tags, and artifacts by file name (a str is text, else JSON)."""
        self._client.log_batch(self.id, tags=[RunTag(key, value) for key, value in tags.items()])
        for name, document in documents.items():
            text = document if isinstance(document, str) else json.dumps(document, indent=2, ensure_ascii=False)
            self._client.log_text(self.id, text, name)

    def close(self, status: str, ended_ms: int) -> None:
        """End the run with FINISHED, FAILED or KILLED, unless a later attempt has gone on with it."""
        if self._client.get_run(self.id).data.tags.get(BEGAN) == str(self._began_ms):
            self._client.set_terminated(self.id, status, ended_ms)

    def _completions(self) -> list[dict[str, Any]]:
        if COMPLETIONS not in [item.path for item in self._client.list_artifacts(self.id)]:
            return []
        with tempfile.TemporaryDirectory() as folder:
            text = Path(self._client.download_artifacts(self.id, COMPLETIONS, folder)).read_text(encoding="utf-8")
        # not splitlines: completions may hold other line separators
        return [json.loads(line) for line in text.rstrip("\n").split("\n")]


def _of_stage(job_id: str, name: str) -> str:
    return f"tags.job_id = '{job_id}' and tags.stage = '{name}'"


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


def _sqlite_file(uri: str) -> Path | None:
    return Path(uri.removeprefix("sqlite:///")).absolute() if uri.startswith("sqlite:///") else None
