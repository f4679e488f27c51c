"""Real servers that go away in the middle of real jobs: every job ends as if they had not, and nothing is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
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

from flows.jobs import outcome
from flows.pipeline import pipeline
from flows.train_sft import train_sft
from grpo_core.config import PipelineConfig, SFTConfig
from grpo_core.files import read_json
from grpo_core.progress import Event, StepEvent, StopReason
from tasks.journal import delivering, journal_folder
from tasks.mlflow_store import EXPERIMENT
from tasks.monitoring import StopFlag, watching
from tasks.places import RESULT
from tasks.tracking import deliver_left_behind

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
RL_STEPS = 12
AWAY_S = 30.0


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


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with mlflow_server(tmp_path_factory.mktemp("outages") / "mlflow") as server:
        yield server


@pytest.fixture
def mlflow(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("LAB_HOME", str(tmp_path / "lab"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.url)
    yield server
    server.stop()
    server.start()


@pytest.fixture
def config(common: dict[str, Any]) -> PipelineConfig:
    """Six steps of SFT and twelve of GRPO."""
    sft = {"examples": 24, "examples_per_step": 4, "eval_examples": 2, "lora_rank": 4, "lr": 1e-2}
    rl = {"prompts": 2 * RL_STEPS, "prompts_per_step": 2, "group_size": 4, "lr": 1e-2}
    return PipelineConfig.parse({**common, "sft": sft, "rl": rl, "eval": {"num_tasks": 4}})


def stored_runs(server: Server, job_id: str) -> dict[str, Run]:
    """The runs of a job by their stage; none has two."""
    client = MlflowClient(server.url)
    experiment = client.get_experiment_by_name(EXPERIMENT)
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id], f"tags.job_id = '{job_id}'")
    stages = {run.data.tags["stage"]: run for run in runs}
    assert len(stages) == len(runs)
    return stages


def assert_all_delivered(server: Server, fate: Fate, result: dict[str, Any]) -> None:
    """The store has every point that a stage told, once, and runs that are nested and finished."""
    assert list(journal_folder().glob("*.jsonl")) == []
    runs, client = stored_runs(server, result["job_id"]), MlflowClient(server.url)
    assert sorted(runs) == ["eval-base", "eval-policy", "eval-warm_start", "pipeline", "rl", "sft"]
    assert {run.info.status for run in runs.values()} == {"FINISHED"}
    parent_id = runs.pop("pipeline").info.run_id
    assert {run.data.tags["mlflow.parentRunId"] for run in runs.values()} == {parent_id}
    for stage, steps in (("sft", 6), ("rl", RL_STEPS)):
        told = defaultdict(list)
        for event in fate.heard[stage]:
            for name, value in event.metrics.items():
                told[name].append((event.step, value))
        assert len(told["loss"]) == steps
        for name, points in told.items():
            history = client.get_metric_history(runs[stage].info.run_id, name)
            assert sorted((point.step, point.value) for point in history) == sorted(points), name


def test_mlflow_away_for_a_while(mlflow: Server, config: PipelineConfig, prefect_harness: None) -> None:
    fate = Fate({("sft", 3): mlflow.stop, ("rl", 5): mlflow.start})
    with watching(fate):
        result = pipeline(config)
    assert fate.happened == [("sft", 3), ("rl", 5)]
    assert result["status"] == "completed"
    assert_all_delivered(mlflow, fate, result)


def test_mlflow_away_for_good_is_told_by_the_next_job(
    mlflow: Server, config: PipelineConfig, sft: Callable[..., SFTConfig], prefect_harness: None
) -> None:
    mlflow.stop(signal.SIGTERM)
    fate = Fate({})
    with watching(fate):
        result = pipeline(config)
    assert (result["status"], result["mlflow_run_id"]) == ("completed", None)
    assert len(list(journal_folder().glob("*.jsonl"))) == 6
    mlflow.start()
    next_job = train_sft(sft())
    assert stored_runs(mlflow, next_job["job_id"])["sft"].info.status == "FINISHED"
    assert_all_delivered(mlflow, fate, result)


def test_job_cancelled_while_mlflow_is_away_is_killed_there(
    mlflow: Server, sft: Callable[..., SFTConfig], prefect_harness: None
) -> None:
    stop = StopFlag()
    fate = Fate({("sft", 1): mlflow.stop, ("sft", 2): lambda: stop.request(StopReason.CANCELLED)})
    with watching(fate, stop):
        state = train_sft(sft(), return_state=True)
    assert state.is_cancelled() and [event.step for event in fate.heard["sft"] if "loss" in event.metrics] == [1, 2]
    mlflow.start()
    deliver_left_behind()
    job_id = outcome(state)["job_id"]
    assert stored_runs(mlflow, job_id)["sft"].info.status == "KILLED"


def test_mlflow_that_hangs_does_not_stall_training(
    mlflow: Server, config: PipelineConfig, prefect_harness: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "600")

    def freeze() -> None:
        mlflow.send(signal.SIGSTOP)
        wait_for(waits_for_mlflow)

    def waits_for_mlflow() -> bool:
        """Whether a delivery is under way, and so the job's thread with it."""
        try:
            with delivering(mlflow.url).acquire(timeout=0):
                return False
        except Timeout:
            return True

    hung = []

    def thaw() -> None:
        hung.append(waits_for_mlflow())
        mlflow.send(signal.SIGCONT)

    fate = Fate({("rl", 2): freeze, ("rl", RL_STEPS): thaw})
    with watching(fate):
        result = pipeline(config)
    assert fate.happened == [("rl", 2), ("rl", RL_STEPS)]
    assert hung == [True]  # ten steps went by while one call was waiting
    assert result["status"] == "completed"
    assert_all_delivered(mlflow, fate, result)


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with prefect_server(tmp_path_factory.mktemp("outages") / "prefect") as server:
        yield server


@pytest.mark.parametrize("moment", ["sft", "report"])
def test_prefect_api_away_for_half_a_minute(api: Server, config: PipelineConfig, tmp_path: Path, moment: str) -> None:
    environment = {"LAB_HOME": str(tmp_path), "PREFECT_API_URL": f"{api.url}/api"}
    job = subprocess.Popen(  # in a process of its own, whose end is a part of the question
        [sys.executable, str(HERE / "doomed.py"), "pipeline"],
        env={**os.environ, "PYTHONPATH": f"{HERE}:{HERE.parent}", **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=(tmp_path / "log").open("w"),
        text=True,
    )
    assert job.stdin is not None and job.stdout is not None
    told = {"config": {**config.model_dump(exclude_unset=True), "checkpoint_dir": str(tmp_path / "run")}}
    job.stdin.write(json.dumps({**told, "kill_after_s": None}))
    job.stdin.close()
    if moment == "sft":
        assert '"sft"' in job.stdout.readline()
    else:
        wait_for(lambda: (tmp_path / "run" / "report" / "lift.json").exists() or job.poll() is not None)
    api.stop()
    time.sleep(AWAY_S)
    api.start()
    said = job.stdout.read().splitlines()
    assert job.wait() == 0, (tmp_path / "log").read_text()[-3000:]
    result = json.loads(said[-1])["result"]
    with temporary_settings({PREFECT_API_URL: f"{api.url}/api"}), get_client(sync_client=True) as client:
        states = {run.name: run.state_name for run in client.read_flow_runs()}
    assert states[result["job_id"]] == "Completed"
    assert read_json(f"{tmp_path}/artifacts/{result['job_id']}/{RESULT}") == result
