"""The MLflow tracking store: the one module that talks to it. All calls may raise; `tracking.py` decides what then."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock
from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

EXPERIMENT = "grpo-lab"
COMPLETIONS = "completions.jsonl"

# Limits of the store (mlflow.utils.validation).
_METRICS_PER_BATCH = 1000
_PARAMS_PER_BATCH = 100
_PARAM_LENGTH = 6000

Point = tuple[str, float, int, int]
"""Name, value, time in milliseconds, step."""


@dataclass
class OpenRun:
    """A run that is being written.

    Attributes:
        last_steps: step of the latest point of each metric.
    """

    id: str
    experiment_id: str
    last_steps: dict[str, int] = field(default_factory=dict)


class MlflowStore:
    """A tracking store, connected."""

    def __init__(self, uri: str):
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
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
    ) -> OpenRun:
        """The run of one stage or pipeline: a new one, or that of an earlier try, found as `tracking.open_run` says."""
        nesting = {"mlflow.parentRunId": parent} if parent else {}
        all_tags = {**tags, **nesting, "job_id": job_id, "stage": name}
        queries = [f"tags.job_id = '{job_id}' and tags.stage = '{name}'"]
        if training_run is not None:
            queries.append(f"tags.training_run = '{training_run}'")
        for query in queries:
            if found := self._client.search_runs([self._experiment], query):
                run_id = found[0].info.run_id
                self._client.update_run(run_id, status="RUNNING")
                self._client.log_batch(run_id, tags=[RunTag(key, value) for key, value in all_tags.items()])
                return OpenRun(run_id, self._experiment, self._last_steps(run_id))
        run_name = f"{job_id}/{name}" if parent else job_id
        run_id = self._client.create_run(self._experiment, run_name=run_name, tags=all_tags).info.run_id
        values = [Param(key, value) for key, value in flattened(params)]
        for start in range(0, len(values), _PARAMS_PER_BATCH):
            self._client.log_batch(run_id, params=values[start : start + _PARAMS_PER_BATCH])
        return OpenRun(run_id, self._experiment)

    def send_points(self, run: OpenRun, points: Sequence[Point]) -> None:
        """Send those points that are later than what the run has of their metric."""
        new = list[Point]()
        latest = dict(run.last_steps)
        for key, value, time_ms, step in points:
            name = sanitised(key)
            if latest.get(name, -1) < step:
                latest[name] = step
                new.append((name, value, time_ms, step))
        for start in range(0, len(new), _METRICS_PER_BATCH):
            batch = new[start : start + _METRICS_PER_BATCH]
            self._client.log_batch(run.id, metrics=[Metric(*point) for point in batch])
            run.last_steps |= {name: step for name, _, _, step in batch}

    def send_completions(self, run: OpenRun, rows: Sequence[dict[str, Any]]) -> None:
        """Add the completions of steps later than those that the run's table has."""
        lines = self._completions(run)
        last = json.loads(lines[-1])["step"] if lines else -1
        lines += [json.dumps(row, ensure_ascii=False) for row in rows if row["step"] > last]
        if lines:
            self._client.log_text(run.id, "\n".join(lines) + "\n", COMPLETIONS)

    def record(self, run: OpenRun, tags: Mapping[str, str], documents: Mapping[str, Any]) -> None:
        """Write tags, and artifacts by file name (a str is text, else JSON)."""
        self._client.log_batch(run.id, tags=[RunTag(key, value) for key, value in tags.items()])
        for name, document in documents.items():
            text = document if isinstance(document, str) else json.dumps(document, indent=2, ensure_ascii=False)
            self._client.log_text(run.id, text, name)

    def close(self, run: OpenRun, status: str) -> None:
        """End the run with FINISHED, FAILED or KILLED."""
        self._client.set_terminated(run.id, status)

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

    def _last_steps(self, run_id: str) -> dict[str, int]:
        names = self._client.get_run(run_id).data.metrics
        return {name: max(point.step for point in self._client.get_metric_history(run_id, name)) for name in names}

    def _completions(self, run: OpenRun) -> list[str]:
        if COMPLETIONS not in [item.path for item in self._client.list_artifacts(run.id)]:
            return []
        with tempfile.TemporaryDirectory() as folder:
            text = Path(self._client.download_artifacts(run.id, COMPLETIONS, folder)).read_text(encoding="utf-8")
        return text.rstrip("\n").split("\n")  # not splitlines: completions may hold other line separators


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
