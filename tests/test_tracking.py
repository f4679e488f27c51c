"""MLflow as a monitor: few calls, nothing lost, nothing twice, and never a reason to stop training."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient
from tracked import dies, gone, open_run, points, step, wait_for

from grpo_core.progress import Begun, Notice, StepEvent
from tasks.journal import journal_folder
from tasks.mlflow_store import COMPLETIONS, sanitised


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An SQLite store for all tests of this file, since making one takes seconds."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow') / 'mlflow.db'}"


@pytest.fixture
def client(store: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[MlflowClient]:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    yield MlflowClient(store)


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
    run = open_run("rl", "job-live", deliver_every_s=0.01)
    run.emit(step(1))
    wait_for(lambda: points(client, run, "reward") == [(1, 1 / 500)])
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
    path = client.download_artifacts(str(first.id), COMPLETIONS)
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


def test_a_store_that_is_away_for_a_while_gets_every_point_later(
    client: MlflowClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = open_run("rl", "job-away", deliver_every_s=0.01)
    with monkeypatch.context() as away:
        away.setattr(MlflowClient, "log_batch", gone)
        for number in range(1, 4):
            run.emit(step(number))
        wait_for(lambda: "MLflow does not answer (gone)" in caplog.text)
        assert points(client, run, "reward") == []
    wait_for(lambda: len(points(client, run, "reward")) == 3)
    run.close("FINISHED")
    assert points(client, run, "reward") == [(number, number / 500) for number in (1, 2, 3)]


def test_what_could_not_be_delivered_is_delivered_by_the_next_job(
    client: MlflowClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = open_run("rl", "job-undelivered")
    run_id = str(run.id)
    with monkeypatch.context() as away:
        for method in ("log_batch", "log_text", "set_terminated"):
            away.setattr(MlflowClient, method, gone)
        run.emit(step(1))
        run.record(metrics={"x": 1.0}, tags={"digest": "abc"}, documents={"a.json": {"y": 2}})
        run.close("KILLED")
    assert [record.message.split(" was ")[-1] for record in caplog.records if record.name == "tasks.tracking"] == [
        "MLflow does not answer (gone); rl goes on, and its points wait",
        "not delivered to MLflow: the next job tries again",
    ]
    assert client.get_run(run_id).info.status == "RUNNING"
    open_run("sft", "job-next").close("FINISHED")
    stored = client.get_run(run_id)
    assert (stored.info.status, stored.data.tags["digest"], stored.data.metrics["x"]) == ("KILLED", "abc", 1.0)
    assert {item.path for item in client.list_artifacts(run_id)} == {"a.json", COMPLETIONS}
    assert not list(journal_folder().glob("*.jsonl"))


def test_a_killed_process_leaves_a_run_that_ends_failed_with_all_its_points(client: MlflowClient) -> None:
    killed = open_run("rl", "job-killed")
    for number in (1, 2):
        killed.emit(step(number))
    with killed._journal.path.open("a") as file:
        file.write('{"points": [["rew')  # the kill came in the middle of a line
    dies(killed)
    open_run("sft", "job-after").close("FINISHED")
    assert client.get_run(str(killed.id)).info.status == "FAILED"
    assert points(client, killed, "reward") == [(1, 1 / 500), (2, 2 / 500)]


def test_a_training_run_that_another_job_resumes_goes_on_in_its_mlflow_run(client: MlflowClient) -> None:
    first = open_run("rl", "job-first", parent=None)
    first.emit(Begun("rl", "run-x", []))
    first.emit(step(1))
    first.close("FAILED")
    parent = open_run("pipeline", "job-second")
    second = open_run("rl", "job-second", parent="pipeline", training_run="run-x")
    assert second.id == first.id
    # The checkpoint knows of step 2, whose point the killed machine took with it.
    second.emit(Begun("rl", "run-x", [{"step": 1, "reward": 1 / 500}, {"step": 2, "reward": 2 / 500}]))
    second.emit(step(3))
    second.close("FINISHED")
    parent.close("FINISHED")
    assert points(client, second, "reward") == [(1, 1 / 500), (2, 2 / 500), (3, 3 / 500)]
    tags = client.get_run(str(first.id)).data.tags
    assert (tags["job_id"], tags["mlflow.parentRunId"]) == ("job-second", parent.id)


def test_a_runs_page_is_named_where_the_store_is_a_server(
    client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = open_run("pipeline", "job-page")
    assert run.link is None  # a file store has no pages
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9/")  # nothing answers there
    assert run.link is not None and run._delivery.run is not None
    assert run.link == f"http://127.0.0.1:9/#/experiments/{run._delivery.run.experiment_id}/runs/{run.id}"
    run.close("FINISHED")


def test_a_stage_is_nested_and_its_config_flat(client: MlflowClient) -> None:
    parent = open_run("pipeline", "job-nested")
    config = {"lr": 0.1, "model_dir": None, "compute": {"spot": False}, "environment_options": {"text": "x" * 7000}}
    child = open_run("eval-base", "job-nested", parent="pipeline", params=config)
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
    assert "rl goes on, and its points wait" in caplog.text
    run._journal.remove()


def test_names_that_the_store_refuses_are_rewritten() -> None:
    assert [sanitised(name) for name in ("pass@1", "clip_ratio/low", "p(x)")] == [
        "pass_1",
        "clip_ratio/low",
        "p_x_",
    ]
