"""Real servers that go away in the middle of real jobs: every job ends as if they had not, and nothing is lost."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import Timeout
from mlflow.entities import Run
from mlflow.tracking import MlflowClient
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, temporary_settings
from servers import Server, mlflow_server, prefect_server
from tracked import wait_for

from flows.pipeline import pipeline
from flows.train_sft import train_sft
from grpo_core.config import PipelineConfig, SFTConfig
from grpo_core.progress import Event, StepEvent, StopReason
from tasks.journal import delivering, journal_folder
from tasks.mlflow_store import EXPERIMENT
from tasks.monitoring import watching

pytestmark = pytest.mark.slow

RL_STEPS = 12


class Fate:
    """Hears every step, and at some of them something happens before the job goes on."""

    def __init__(self, at: dict[tuple[str, int], Callable[[], object]]):
        self.heard: dict[str, list[StepEvent]] = defaultdict(list)
        self.happened: list[tuple[str, int]] = []
        self._at = at

    def emit(self, event: Event) -> None:
        if isinstance(event, StepEvent):
            self.heard[event.stage].append(event)
            moment = event.stage, event.step
            if "loss" in event.metrics and moment in self._at:
                self._at[moment]()
                self.happened.append(moment)

    def stop_requested(self) -> StopReason | None:
        return None


@pytest.fixture
def mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("LAB_HOME", str(tmp_path / "lab"))
    with mlflow_server(tmp_path / "mlflow") as server:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", server.url)
        yield server


@pytest.fixture
def config(common: dict[str, Any]) -> PipelineConfig:
    """Six steps of SFT and twelve of GRPO."""
    sft = {"examples": 24, "examples_per_step": 4, "eval_examples": 2, "lora_rank": 4, "lr": 1e-2}
    rl = {"prompts": 2 * RL_STEPS, "prompts_per_step": 2, "group_size": 4, "lr": 1e-2}
    return PipelineConfig.parse({**common, "sft": sft, "rl": rl, "eval": {"num_tasks": 4}})


def stored_runs(server: Server) -> dict[str, Run]:
    """The runs by their stage; none has two."""
    client = MlflowClient(server.url)
    experiment = client.get_experiment_by_name(EXPERIMENT)
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    assert max(Counter(run.data.tags["stage"] for run in runs).values()) == 1
    return {run.data.tags["stage"]: run for run in runs}


def assert_all_delivered(server: Server, fate: Fate, parent_id: str) -> None:
    """The store has every point that a stage told, once, and runs that are nested and finished."""
    assert list(journal_folder().glob("*.jsonl")) == []
    runs, client = stored_runs(server), MlflowClient(server.url)
    assert sorted(runs) == ["eval-base", "eval-policy", "eval-warm_start", "pipeline", "rl", "sft"]
    assert {run.info.status for run in runs.values()} == {"FINISHED"}
    assert {run.data.tags.get("mlflow.parentRunId") for run in runs.values()} == {None, parent_id}
    assert runs["pipeline"].info.run_id == parent_id
    for stage in ("sft", "rl"):
        told = defaultdict(list)
        for event in fate.heard[stage]:
            for name, value in event.metrics.items():
                told[name].append((event.step, value))
        assert len(told["loss"]) == {"sft": 6, "rl": RL_STEPS}[stage]
        for name, points in told.items():
            history = client.get_metric_history(runs[stage].info.run_id, name.replace("@", "_"))
            assert sorted((point.step, point.value) for point in history) == sorted(points), name


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_mlflow_away_for_a_while(
    mlflow: Server, config: PipelineConfig, prefect_harness: None, number: signal.Signals
) -> None:
    fate = Fate({("sft", 3): lambda: mlflow.stop(number), ("rl", 5): mlflow.start})
    with watching(fate):
        result = pipeline(config)
    assert fate.happened == [("sft", 3), ("rl", 5)]
    assert result["status"] == "completed"
    assert_all_delivered(mlflow, fate, result["mlflow_run_id"])


def test_mlflow_away_for_good_is_told_by_the_next_job(
    mlflow: Server, config: PipelineConfig, sft: Callable[..., SFTConfig], prefect_harness: None
) -> None:
    fate = Fate({("sft", 3): mlflow.stop})
    with watching(fate):
        result = pipeline(config)
    assert result["status"] == "completed"
    assert fate.happened == [("sft", 3)]
    mlflow.start()
    next_job = train_sft(sft())
    client = MlflowClient(mlflow.url)
    experiment = client.get_experiment_by_name(EXPERIMENT)
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id], f"tags.job_id = '{next_job['job_id']}'")
    assert run.info.status == "FINISHED"
    client.delete_run(run.info.run_id)
    assert_all_delivered(mlflow, fate, result["mlflow_run_id"])
