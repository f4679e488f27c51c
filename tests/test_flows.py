"""Flows on a real Prefect API and a real MLflow store; only the training and the evaluating are stand-ins."""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient
from prefect import Flow
from prefect.client.orchestration import get_client
from pydantic import BaseModel

import grpo_core.evaluation
import grpo_core.grpo
import grpo_core.sft
import tasks.training
from flows.eval_rl import eval_rl
from flows.jobs import outcome
from flows.pipeline import pipeline
from flows.stopping import Interrupts
from flows.train_rl import train_rl
from flows.train_sft import train_sft
from grpo_core.config import Config, EvalConfig, GRPOConfig, PipelineConfig, SFTConfig
from grpo_core.errors import ConfigError, NotFoundError, TrainingFailed
from grpo_core.progress import Monitor, Monitors, StepEvent, StopNow, StopReason
from grpo_core.results import EvaluationResult, ItemResult, TrainingResult
from tasks.monitoring import StopFlag, watching

FLOWS = [pipeline, train_sft, train_rl, eval_rl]
SFT = SFTConfig(family="smollm2-135m")
RL = GRPOConfig(family="smollm2-135m", policy="peft-lora")
PIPELINE = PipelineConfig.parse({"family": "smollm2-135m", "eval": {"num_tasks": 8}})


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow') / 'mlflow.db'}"


@pytest.fixture
def lab_home(prefect_harness: None, store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("LAB_HOME", str(tmp_path))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    yield tmp_path


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stand-ins for the training core, and the list of their calls: each stage is one step."""
    calls: list[str] = []

    def train(kind: str) -> Callable[[Any, Monitor], TrainingResult]:
        def run(config: Any, monitor: Monitor) -> TrainingResult:
            calls.append(kind)
            monitor.emit(StepEvent(kind, 1, 1, {"loss": 1.0, "reward": 0.5}, [{"problem": "p"}]))
            return trained(kind, config.checkpoint_dir, stopped=monitor.stop_requested())

        return run

    def evaluate(config: EvalConfig, output_dir: str, monitor: Monitor, job_id: str) -> EvaluationResult:
        name = Path(output_dir).name if Path(output_dir).parent.name == "eval" else "alone"
        calls.append(f"eval {name}")
        # The base answers none of 8 problems, the warm start half, the policy all.
        monitor.emit(StepEvent("eval", 1, 1, {"problems": 8.0}))
        result = evaluated(config, job_id, passing={"base": 0, "warm_start": 4}.get(name, 8))
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        (Path(output_dir) / "evaluation.json").write_text(result.model_dump_json())
        return result

    monkeypatch.setattr(grpo_core.sft, "train_sft", train("sft"))
    monkeypatch.setattr(grpo_core.grpo, "train_grpo", train("rl"))
    monkeypatch.setattr(grpo_core.evaluation, "evaluate", evaluate)
    return calls


def trained(kind: Any, checkpoint_dir: str, stopped: StopReason | None = None) -> TrainingResult:
    return TrainingResult(
        kind=kind,
        status="cancelled" if stopped else "completed",
        stop_reason=stopped.value if stopped else None,
        checkpoint_dir=checkpoint_dir,
        partial=stopped is not None,
        steps=1,
        metrics={"loss": 1.0, "eval/reward": 0.25},
        digest=f"digest of {kind}",
        initial_digest="initial",
        duration_s=0.1,
    )


def evaluated(config: EvalConfig, job_id: str, passing: int) -> EvaluationResult:
    def item(index: int) -> ItemResult:
        right = index < passing
        return ItemResult(
            id=f"p{index}",
            index=index,
            seed=0,
            completion="7",
            expected="7",
            reward=float(right),
            parts={},
            passed=right,
            tokens=1,
            truncated=False,
        )

    share = passing / 8
    return EvaluationResult(
        job_id=job_id,
        family=config.family,
        environment=config.environment,
        policy=config.policy,
        checkpoint_dir=config.checkpoint_dir,
        num_tasks=8,
        mean_reward=share,
        std_reward=0.0,
        min_reward=0.0,
        max_reward=1.0,
        pass_rate=share,
        pass_rate_ci95=(0.0, 1.0),
        pass_threshold=1.0,
        parts={},
        truncated=0,
        failed=0,
        settings={"seed": 0},
        settings_hash="hash",
        duration_s=0.1,
        per_task=[item(index) for index in range(8)],
    )  # type: ignore[call-arg]


def test_a_pipeline_chains_its_stages_and_keeps_everything(lab_home: Path, core: list[str]) -> None:
    state = pipeline(PIPELINE, return_state=True)
    result = state.result()
    assert core == ["sft", "rl", "eval base", "eval warm_start", "eval policy"]

    flow_run_id = state.state_details.flow_run_id
    assert result["job_id"].startswith("pipeline-") and result["job_id"].endswith(flow_run_id.hex[:8])
    folder = lab_home / "artifacts" / result["job_id"]
    assert result["checkpoint_dir"] == str(folder)
    assert result["sft"]["checkpoint_dir"] == f"{folder}/sft"
    assert result["rl"]["checkpoint_dir"] == f"{folder}/rl"
    assert result["evaluations"]["policy"]["checkpoint_dir"] == f"{folder}/rl"
    assert result["evaluations"]["base"]["checkpoint_dir"] is None
    assert all("per_task" not in each for each in result["evaluations"].values())
    assert {each["job_id"] for each in result["evaluations"].values()} == {result["job_id"]}
    # 0 of 8, then 4 of 8, then 8 of 8: the policy fixed all of the base's and half of the warm start's.
    assert (len(result["lift"]["fixed"]), len(result["rl_lift"]["fixed"])) == (8, 4)
    assert result["lift"]["verdict"] == "improved"
    assert result["report"]["markdown"] == (folder / "report" / "lift.md").as_uri()
    assert json.loads((folder / "job" / "result.json").read_text()) == result
    assert json.loads((folder / "job" / "config.json").read_text())["rl"]["lr"] == 2e-4  # the family's, written in


def test_a_pipelines_runs_are_nested_in_mlflow(lab_home: Path, core: list[str], store: str) -> None:
    result = pipeline(PIPELINE)
    client = MlflowClient(store)
    parent = client.get_run(result["mlflow_run_id"])
    experiment = parent.info.experiment_id
    children = client.search_runs([experiment], f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'")
    stages = {child.data.tags["stage"]: child for child in children}
    assert sorted(stages) == ["eval-base", "eval-policy", "eval-warm_start", "rl", "sft"]
    assert {run.info.status for run in (parent, *children)} == {"FINISHED"}
    # The step's own, and what only the result holds.
    assert stages["rl"].data.metrics == {"loss": 1.0, "reward": 0.5, "eval/reward": 0.25}
    assert stages["rl"].data.tags["digest"] == "digest of rl"
    assert stages["eval-policy"].data.metrics["pass_rate"] == 1.0
    assert stages["eval-policy"].data.tags["partial"] == "false"
    assert parent.data.metrics["lift/pass_rate"] == 1.0
    assert parent.data.metrics["rl_lift/pass_rate"] == 0.5
    assert parent.data.tags["verdict"] == "improved"
    assert parent.data.tags["job_id"] == result["job_id"]
    assert {item.path for item in client.list_artifacts(parent.info.run_id)} == {"lift.json", "lift.md"}
    assert "completions.jsonl" in {item.path for item in client.list_artifacts(stages["rl"].info.run_id)}


def test_an_evaluation_alone_keeps_its_items_in_a_file(lab_home: Path, core: list[str]) -> None:
    result = eval_rl(EvalConfig(family="smollm2-135m"))
    assert "per_task" not in result
    assert result["url"] == str(lab_home / "artifacts" / result["job_id"] / "evaluation.json")
    assert len(json.loads(Path(result["url"]).read_text())["per_task"]) == 8


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_lets_the_stage_save_and_ends_the_pipeline(
    lab_home: Path, core: list[str], store: str, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    def interrupted(config: GRPOConfig, monitor: Monitor) -> TrainingResult:
        core.append("rl")
        os.kill(os.getpid(), number)  # the main thread hears it, this one goes on
        while not (reason := monitor.stop_requested()):
            pass
        assert config.checkpoint_dir is not None
        return trained("rl", config.checkpoint_dir, stopped=reason)

    monkeypatch.setattr(grpo_core.grpo, "train_grpo", interrupted)
    state = pipeline(PIPELINE, return_state=True)
    assert state.is_cancelled()
    assert core == ["sft", "rl"]
    result = outcome(state)
    assert (result["status"], result["stop_reason"]) == ("cancelled", "cancelled")
    assert (result["sft"]["status"], result["rl"]["status"], result["lift"]) == ("completed", "cancelled", None)
    partial = lab_home / "artifacts" / result["job_id"] / "rl"
    assert state.message == f"stopped (cancelled); partial checkpoint: {partial}"
    assert MlflowClient(store).get_run(result["mlflow_run_id"]).info.status == "KILLED"
    with get_client(sync_client=True) as client:
        stored = client.read_flow_run(state.state_details.flow_run_id).state
    assert stored is not None and stored.is_cancelled() and stored.message == state.message


@pytest.fixture
def ends_as_it_is_stopped(core: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """An SFT stage that hears of a stop when its last step is done already."""
    train = grpo_core.sft.train_sft

    def last_moment(config: SFTConfig, monitor: Monitor) -> TrainingResult:
        result = train(config, monitor)
        os.kill(os.getpid(), signal.SIGINT)
        while not monitor.stop_requested():
            pass
        return result

    monkeypatch.setattr(grpo_core.sft, "train_sft", last_moment)


@pytest.mark.usefixtures("ends_as_it_is_stopped")
def test_a_stop_in_a_stages_last_moment_keeps_what_is_complete(lab_home: Path, core: list[str]) -> None:
    alone = train_sft(SFT)
    assert (alone["status"], Path(alone["checkpoint_dir"]).name) == ("completed", alone["job_id"])
    core.clear()
    state = pipeline(PIPELINE, return_state=True)
    result = outcome(state)
    assert state.is_cancelled() and core == ["sft"]
    assert (result["stop_reason"], result["sft"]["status"], result["rl"]) == ("cancelled", "completed", None)


def test_one_wish_sent_twice_is_one_wish_and_an_ignored_signal_stays_ignored() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interrupts(twice := StopFlag()):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # as wrappers do
    assert twice.stop_requested() is StopReason.CANCELLED
    assert signal.getsignal(signal.SIGINT) is before
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with Interrupts(ignored := StopFlag()):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert ignored.stop_requested() is None


INTERRUPTED_AGAIN = """
import signal
from flows import stopping
from tasks.monitoring import StopFlag

stopping.SAME_WISH_S = -1
with stopping.Interrupts(StopFlag()):
    signal.raise_signal(signal.SIGINT)
    print("still here", flush=True)
    signal.raise_signal(signal.SIGINT)
    print("not any more", flush=True)
"""


def test_a_second_interrupt_ends_the_process_at_once() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED_AGAIN], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGINT, "still here\n")


def test_the_time_ceiling_is_the_jobs(lab_home: Path, core: list[str]) -> None:
    hurried = PIPELINE.model_copy(update={"compute": PIPELINE.compute.model_copy(update={"max_duration_hours": 1e-9})})
    state = pipeline(hurried, return_state=True)
    assert state.is_cancelled()
    assert core == ["sft"]
    assert outcome(state)["stop_reason"] == "time_ceiling"


def test_a_stopped_evaluation_cancels_its_job(lab_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object, **__: object) -> EvaluationResult:
        raise StopNow(StopReason.TIME_CEILING)

    monkeypatch.setattr(grpo_core.evaluation, "evaluate", stopped)
    state = eval_rl(EvalConfig(family="smollm2-135m"), return_state=True)
    assert state.is_cancelled() and state.message == "stopped (time_ceiling)"


@pytest.fixture
def no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    task = tasks.training.train_sft
    assert task.retries == 2 and task.retry_delay_seconds == [2, 4]
    monkeypatch.setattr(tasks.training, "train_sft", task.with_options(retry_delay_seconds=0, retry_jitter_factor=0))


@pytest.mark.usefixtures("no_delay")
def test_a_passing_trouble_is_tried_again(lab_home: Path, core: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    train, folders = grpo_core.sft.train_sft, []

    def troubled(config: SFTConfig, monitor: Monitor) -> TrainingResult:
        folders.append(config.checkpoint_dir)
        if len(folders) < 3:
            raise OSError("disk full")
        return train(config, monitor)

    monkeypatch.setattr(grpo_core.sft, "train_sft", troubled)
    assert train_sft(SFT)["status"] == "completed"
    assert len(folders) == 3 and len(set(folders)) == 1  # the same folder, so training resumes there


@pytest.mark.usefixtures("no_delay")
@pytest.mark.parametrize(
    "error", [ConfigError("no", field="lr"), TrainingFailed("the policy did not change", code="NO_SIGNAL")]
)
def test_an_error_raised_on_purpose_is_not(lab_home: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    calls = []

    def refusing(*_: object) -> TrainingResult:
        calls.append(1)
        raise error

    monkeypatch.setattr(grpo_core.sft, "train_sft", refusing)
    with pytest.raises(type(error)):
        train_sft(SFT)
    assert calls == [1]
    (document,) = (json.loads(path.read_text()) for path in lab_home.glob("artifacts/*/job/result.json"))
    assert (document["status"], document["error"]["code"]) == ("failed", error.code)  # type: ignore[attr-defined]
    assert document["stop_reason"] == ("no_signal" if isinstance(error, TrainingFailed) else None)


@pytest.mark.usefixtures("no_delay")
def test_a_stop_is_never_tried_again(lab_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def stopping(*_: object) -> TrainingResult:
        calls.append(1)
        raise StopNow(StopReason.CANCELLED)

    monkeypatch.setattr(grpo_core.sft, "train_sft", stopping)
    with pytest.raises(StopNow):
        train_sft(SFT)
    assert calls == [1]


def test_a_missing_input_is_refused_before_any_stage(lab_home: Path, core: list[str]) -> None:
    with pytest.raises(NotFoundError):
        train_rl(RL.model_copy(update={"init_checkpoint_dir": "sft-1-00000000"}))
    assert core == []


def test_a_relative_checkpoint_dir_lies_under_the_artifact_root(lab_home: Path, core: list[str]) -> None:
    result = train_rl(RL.model_copy(update={"checkpoint_dir": "mine"}))
    assert result["checkpoint_dir"] == str(lab_home / "artifacts" / "mine")
    assert result["job_id"].startswith("train-")


def test_a_door_watches_and_cannot_hurt(lab_home: Path, core: list[str]) -> None:
    events: list[Any] = []

    class Recorder(Monitors):
        def emit(self, event: Any) -> None:
            events.append(event)

    class Broken(Monitors):
        def emit(self, event: Any) -> None:
            raise RuntimeError("display is gone")

    with watching(Broken(), Recorder()):
        assert pipeline(PIPELINE)["status"] == "completed"
    # The evaluations are told apart.
    assert [event.stage for event in events] == ["sft", "rl", "eval-base", "eval-warm_start", "eval-policy"]


@pytest.mark.parametrize("flow", FLOWS, ids=lambda flow: flow.name)
def test_a_flows_form_is_plain_and_explained(flow: Flow[Any, Any]) -> None:
    schema = flow.parameters.model_dump()
    assert list(schema["properties"]) == ["config"]
    text = json.dumps(schema)
    assert "anyOf" not in text and "oneOf" not in text
    described = [schema["properties"], *(model["properties"] for model in schema["definitions"].values())]
    assert [
        name for properties in described for name, field in properties.items() if not field.get("description")
    ] == []


@pytest.mark.parametrize("config", [SFTConfig, GRPOConfig, EvalConfig, PipelineConfig])
def test_no_default_is_hidden_in_a_factory(config: type[Config]) -> None:
    def factories(model: type[BaseModel]) -> Iterator[str]:
        for name, field in model.model_fields.items():
            if field.default_factory is not None:
                yield name
            if inspect.isclass(field.annotation) and issubclass(field.annotation, BaseModel):
                yield from factories(field.annotation)

    assert list(factories(config)) == []
