"""MLflow as a monitor: few calls, nothing lost, nothing twice, and never a reason to stop training."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from grpo_core.progress import Notice, StepEvent
from tasks import tracking

NEVER = 3600.0


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An SQLite store for all tests of this file, since making one takes seconds."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow') / 'mlflow.db'}"


@pytest.fixture
def client(store: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[MlflowClient]:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    yield MlflowClient(store)


def open_run(name: str, job: str, **fields: object) -> tracking.TrackedRun:
    defaults = {"params": {}, "tags": {}, "flush_every_s": NEVER}
    return tracking.open_run(name, job_id=job, **{**defaults, **fields})  # type: ignore[arg-type]


def step(number: int, **metrics: float) -> StepEvent:
    completions = [{"problem": f"p{number}", "completion": "7"}]
    return StepEvent(
        "rl", number, 500, metrics or {"reward": number / 500, "loss": 1.0, "clip_ratio/low": 0.25}, completions
    )


def points(client: MlflowClient, run: tracking.TrackedRun, name: str) -> list[tuple[int, float]]:
    assert run.id is not None
    return sorted((point.step, point.value) for point in client.get_metric_history(run.id, name))


def test_many_steps_cost_few_calls_and_none_is_lost(client: MlflowClient, monkeypatch: pytest.MonkeyPatch) -> None:
    run = open_run("rl", "job-calls")
    calls = []
    send = MlflowClient.log_batch
    monkeypatch.setattr(MlflowClient, "log_batch", lambda *args, **values: (calls.append(1), send(*args, **values))[1])
    for number in range(1, 501):
        run.emit(step(number))
    assert calls == []  # emitting only remembers
    run.close("FINISHED")
    # 500 steps of 3 values are 1500 points; the store takes 1000 a call.
    assert len(calls) == 2
    assert points(client, run, "reward") == [(number, number / 500) for number in range(1, 501)]
    assert len(points(client, run, "clip_ratio/low")) == 500
    assert client.get_run(str(run.id)).info.status == "FINISHED"


def test_points_are_sent_while_the_stage_runs(client: MlflowClient) -> None:
    run = open_run("rl", "job-live", flush_every_s=0.01)
    run.emit(step(1))
    found: list[tuple[int, float]] = []
    for _ in range(1000):  # the thread that sends needs a moment, on a busy machine a long one
        if found := points(client, run, "reward"):
            break
        time.sleep(0.02)
    assert found == [(1, 1 / 500)]
    run.close("KILLED")
    assert client.get_run(str(run.id)).info.status == "KILLED"


def test_a_stage_tried_again_goes_on_in_its_run(client: MlflowClient) -> None:
    first = open_run("rl", "job-again", params={"lr": 1e-4})
    for number in (1, 2, 3):
        first.emit(step(number))
    first.close("FAILED")
    second = open_run("rl", "job-again", params={"lr": 2e-4})
    assert second.id == first.id
    for number in (3, 4):  # resumed from the checkpoint of step 2
        second.emit(step(number))
    second.close("FINISHED")
    assert [number for number, _ in points(client, second, "reward")] == [1, 2, 3, 4]
    assert client.get_run(str(first.id)).data.params == {"lr": "0.0001"}
    path = client.download_artifacts(str(first.id), tracking.COMPLETIONS)
    rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
    assert [(row["step"], row["problem"]) for row in rows] == [(1, "p1"), (2, "p2"), (3, "p3"), (4, "p4")]


def test_a_point_is_logged_once_for_each_metric(client: MlflowClient) -> None:
    first = open_run("rl", "job-points")
    for event in (step(0, **{"eval/reward": 0.25}), step(1), step(2)):
        first.emit(event)
    first.close("FAILED")
    second = open_run("rl", "job-points")
    # Resumed after step 1: the first validation comes again, a late one of step 2 only now.
    for event in (step(0, **{"eval/reward": 0.25}), step(2), step(2, **{"eval/reward": 0.5}), step(3)):
        second.emit(event)
    second.record(metrics={"reward": 3 / 500, "eval/reward": 0.75}, tags={}, documents={}, step=3)
    second.close("FINISHED")
    assert points(client, second, "eval/reward") == [(0, 0.25), (2, 0.5), (3, 0.75)]
    assert points(client, second, "reward") == [(1, 1 / 500), (2, 2 / 500), (3, 3 / 500)]


def test_what_waits_for_a_store_is_bounded_and_the_rest_is_counted(
    client: MlflowClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracking, "_KEPT", 5)
    run = open_run("rl", "job-bounded")
    for number in range(1, 5):
        run.emit(step(number))
    run.close("FINISHED")
    # 4 steps are 12 points and 4 completions: room for 5 points, so 7 are lost.
    assert "7 points and completions of rl were not sent to MLflow" in caplog.text
    assert points(client, run, "loss") == [(1, 1.0), (2, 1.0)]


def test_a_runs_page_is_named_without_asking_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    run = tracking.TrackedRun(None, "run-1", "7", "pipeline", NEVER)
    assert run.link is None  # a file store has no pages
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9/")  # nothing answers there
    assert run.link == "http://127.0.0.1:9/#/experiments/7/runs/run-1"


def test_a_stage_is_nested_and_its_config_flat(client: MlflowClient) -> None:
    parent = open_run("pipeline", "job-nested")
    config = {"lr": 0.1, "model_dir": None, "compute": {"spot": False}, "environment_options": {"text": "x" * 7000}}
    child = open_run("eval-base", "job-nested", parent=parent.id, params=config)
    child.emit(StepEvent("eval-base", 1, 1, {"reward": 0.5}))
    child.record(metrics={"pass@1": 0.5}, tags={"settings_hash": "abc"}, documents={"a.json": {"x": 1}, "b.md": "# b"})
    child.close("FINISHED")
    parent.close("FINISHED")
    stored = client.get_run(str(child.id))
    assert stored.data.tags["mlflow.parentRunId"] == parent.id
    # A field without a value is left out; the store takes 6000 characters.
    assert stored.data.params == {"lr": "0.1", "compute.spot": "False", "environment_options.text": "x" * 6000}
    assert stored.data.metrics == {"reward": 0.5, "pass_1": 0.5}
    assert sorted(item.path for item in client.list_artifacts(str(child.id))) == ["a.json", "b.md"]


def test_the_progress_of_an_evaluation_within_training_is_no_metric(client: MlflowClient) -> None:
    run = open_run("rl", "job-inner")
    run.emit(StepEvent("eval", 1, 1, {"problems": 16.0}))
    run.emit(Notice("info", "hello"))
    run.emit(StepEvent("rl", 1, 1, {"eval/reward": 0.5}))
    run.close("FINISHED")
    assert client.get_run(str(run.id)).data.metrics == {"eval/reward": 0.5}


def test_artifacts_lie_beside_their_database(client: MlflowClient, store: str) -> None:
    run = open_run("rl", "job-place")
    run.close("FINISHED")
    root = Path(store.removeprefix("sqlite:///")).parent / "artifacts"
    assert str(client.get_run(str(run.id)).info.artifact_uri).startswith(root.as_uri())


def test_without_a_store_training_goes_on(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nonsense://nowhere")
    run = open_run("rl", "job-none")
    run.emit(step(1))
    run.record(metrics={"x": 1.0}, tags={}, documents={})
    run.close("FINISHED")
    assert run.id is None
    assert "goes on without it" in caplog.text


def test_a_store_that_dies_is_said_once(
    client: MlflowClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = open_run("rl", "job-dies")

    def dead(*_: object, **__: object) -> None:
        raise ConnectionError("gone")

    for method in ("log_batch", "log_text", "set_terminated"):
        monkeypatch.setattr(MlflowClient, method, dead)
    run.emit(step(1))
    run.record(metrics={"x": 1.0}, tags={}, documents={})
    run.close("FINISHED")
    # One step of three values and a completion was still waiting.
    assert [record.message for record in caplog.records if record.name == "tasks.tracking"] == [
        "MLflow does not answer (gone); rl goes on, its points may be incomplete",
        "4 points and completions of rl were not sent to MLflow",
    ]


def test_names_that_the_store_refuses_are_rewritten() -> None:
    assert [tracking.sanitised(name) for name in ("pass@1", "clip_ratio/low", "p(x)")] == [
        "pass_1",
        "clip_ratio/low",
        "p_x_",
    ]
