"""What processes left to be told: delivered by anyone, in any order, and whatever became of run and disk since."""

from __future__ import annotations

import json
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from mlflow.entities import Run
from mlflow.tracking import MlflowClient
from tracked import dies, ended_process, gone, open_run, points, step

from grpo_core.processes import Process
from grpo_core.progress import Begun
from tasks.journal import Journal, journal_folder, left_behind
from tasks.mlflow_store import COMPLETIONS, EXPERIMENT
from tasks.tracking import TrackedRun, deliver_left_behind


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow') / 'mlflow.db'}"


@pytest.fixture
def client(store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MlflowClient:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    monkeypatch.setenv("LAB_HOME", str(tmp_path))  # nothing is left but what the test leaves
    return MlflowClient(store)


@contextmanager
def away() -> Iterator[None]:
    """The store takes nothing for a while."""
    with pytest.MonkeyPatch.context() as patch:
        for method in ("search_runs", "create_run", "log_batch", "log_text", "set_terminated"):
            patch.setattr(MlflowClient, method, gone)
        yield


def runs(client: MlflowClient, query: str) -> list[Run]:
    experiment = client.get_experiment_by_name(EXPERIMENT)
    assert experiment is not None
    return client.search_runs([experiment.experiment_id], query)


def completions(client: MlflowClient, run_id: str) -> list[tuple[int, str]]:
    rows = Path(client.download_artifacts(run_id, COMPLETIONS)).read_text().splitlines()
    return [(row["step"], row["problem"]) for row in map(json.loads, rows)]


def killed_while_the_store_was_away(job: str, training_run: str) -> TrackedRun:
    """A training stage that did three steps, of which nothing was delivered."""
    with away():
        run = open_run("rl", job)
        run.emit(Begun("rl", training_run, []))
        for number in (1, 2, 3):
            run.emit(step(number))
    return run


@pytest.mark.parametrize("second_job", ["same", "another"])
def test_an_earlier_attempt_that_is_delivered_last_neither_doubles_nor_falsifies(
    client: MlflowClient, second_job: str
) -> None:
    job, training_run = f"job-late-{second_job}", f"training-{second_job}"
    first = killed_while_the_store_was_away(job, training_run)  # its process seems to live: nobody delivers it yet
    second_job = {"same": job, "another": f"{job}-2"}[second_job]
    second = open_run("rl", second_job, training_run=training_run)
    # It goes on from the checkpoint of step 2, whose history has no metric `kl`.
    second.emit(Begun("rl", training_run, [{"step": 1, "reward": 1 / 500}, {"step": 2, "reward": 2 / 500}]))
    second.emit(step(3))
    second._delivery.drain()
    dies(first)
    deliver_left_behind()
    assert first._journal.path.exists()  # two that write at once could log a point twice
    second.emit(step(4))
    second.close("FINISHED")
    assert list(journal_folder().glob("*.jsonl")) == []  # the end of the second made room for the first

    (run,) = runs(client, f"tags.training_run = '{training_run}'")
    assert (run.info.run_id, run.info.status, run.data.tags["job_id"]) == (second.id, "FINISHED", second_job)
    assert points(client, second, "reward") == [(number, number / 500) for number in (1, 2, 3, 4)]
    assert points(client, second, "loss") == [(number, 1.0) for number in (1, 2, 3, 4)]
    assert completions(client, run.info.run_id) == [(1, "p1"), (2, "p2"), (3, "p3"), (4, "p4")]


def test_an_earlier_attempt_that_is_delivered_first_is_gone_on_with(client: MlflowClient) -> None:
    first = killed_while_the_store_was_away("job-early", "training-early")
    dies(first)
    second = open_run("rl", "job-early-2", training_run="training-early")
    assert not first._journal.path.exists()
    assert points(client, second, "reward") == [(1, 1 / 500), (2, 2 / 500), (3, 3 / 500)]
    for number in (3, 4):
        second.emit(step(number))
    second.close("FINISHED")
    assert points(client, second, "reward") == [(number, number / 500) for number in (1, 2, 3, 4)]
    assert completions(client, str(second.id)) == [(1, "p1"), (2, "p2"), (3, "p3"), (4, "p4")]
    assert client.get_run(str(second.id)).info.status == "FINISHED"


def test_a_run_ends_when_its_process_did(client: MlflowClient) -> None:
    run = killed_while_the_store_was_away("job-end", "training-end")
    dies(run)
    began_ms, ended_ms = run._journal.header["open"]["began_ms"], run._journal.ended_ms()
    deliver_left_behind()
    (stored,) = runs(client, "tags.job_id = 'job-end'")
    assert (stored.info.status, stored.info.start_time, stored.info.end_time) == ("FAILED", began_ms, ended_ms)


def test_params_that_failed_with_the_store_come_later(client: MlflowClient, monkeypatch: pytest.MonkeyPatch) -> None:
    log_batch = MlflowClient.log_batch

    def without_params(*args: object, **values: object) -> None:
        if "params" in values:
            gone()
        log_batch(*args, **values)  # type: ignore[arg-type]

    with monkeypatch.context() as failing:
        failing.setattr(MlflowClient, "log_batch", without_params)
        run = open_run("rl", "job-params", params={"lr": 0.5, "seed": 1})
    run.close("FINISHED")
    assert client.get_run(str(run.id)).data.params == {"lr": "0.5", "seed": "1"}


def test_a_stage_is_nested_in_a_run_that_is_opened_later(client: MlflowClient) -> None:
    with away():
        parent = open_run("pipeline", "job-nest", params={"seed": 1})
    assert parent.id is None
    child = open_run("sft", "job-nest", parent="pipeline")
    child.close("FINISHED")
    parent.close("FINISHED")
    stored = client.get_run(str(parent.id))
    assert client.get_run(str(child.id)).data.tags["mlflow.parentRunId"] == parent.id
    assert (stored.info.status, stored.info.run_name, stored.data.params) == ("FINISHED", "job-nest", {"seed": "1"})


def opening(job: str, uri: str) -> dict[str, object]:
    fields = {"name": "rl", "job_id": job, "parent": None, "training_run": None, "params": {}, "tags": {}}
    return {"uri": uri, "open": {**fields, "began_ms": 1}}


@contextmanager
def hanging_up() -> Iterator[tuple[str, list[int]]]:
    """A server that hangs up on everybody, and how often it did."""
    calls: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def hang_up() -> None:
            while True:
                try:
                    server.accept()[0].close()
                except OSError:
                    return
                calls.append(1)

        threading.Thread(target=hang_up, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}", calls
        server.shutdown(socket.SHUT_RDWR)


def test_a_dead_store_is_asked_once_and_the_others_are_told(
    client: MlflowClient, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with hanging_up() as (dead, calls):
        for number, uri in enumerate([dead, dead, store, dead]):
            Journal.begin(f"job-{number}", opening(f"job-dead-{number}", uri)).append({"close": "KILLED"})
        deliver_left_behind()
        assert len(calls) == 1
    assert [journal.header["uri"] for journal in left_behind()] == [dead] * 3


def test_nothing_left_is_found_without_mlflow(tmp_path: Path) -> None:
    code = "import sys; from tasks.tracking import deliver_left_behind as d; d(); print('mlflow' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"LAB_HOME": str(tmp_path)}, capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


def test_many_threads_deliver_each_journal_once(client: MlflowClient) -> None:
    left = [killed_while_the_store_was_away(f"job-many-{number}", f"training-many-{number}") for number in range(4)]
    for run in left:
        dies(run)
    threads = [threading.Thread(target=deliver_left_behind) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert left_behind() == []
    stored = runs(client, "tags.job_id LIKE 'job-many-%'")
    assert sorted((run.data.tags["job_id"], run.info.status) for run in stored) == [
        (f"job-many-{number}", "FAILED") for number in range(4)
    ]
    for run in stored:
        assert len(client.get_metric_history(run.info.run_id, "reward")) == 3


@contextmanager
def disk_full_at(size: int) -> Iterator[None]:
    """No file grows beyond `size` bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_disk_that_is_full_for_a_while_costs_only_what_it_did_not_take(
    client: MlflowClient, caplog: pytest.LogCaptureFixture
) -> None:
    run = open_run("rl", "job-full")
    run.emit(step(1))
    with disk_full_at(run._journal.path.stat().st_size + 20):  # the next line is cut off
        run.emit(step(2))
    run.emit(step(3))
    run.close("FINISHED")
    assert "MLflow will lack points of rl" in caplog.text
    assert points(client, run, "reward") == [(1, 1 / 500), (3, 3 / 500)]
    assert client.get_run(str(run.id)).info.status == "FINISHED"


def test_a_journal_that_cannot_be_begun_stops_no_stage(client: MlflowClient, caplog: pytest.LogCaptureFixture) -> None:
    journal_folder().parent.mkdir(parents=True)
    journal_folder().write_text("")  # no folder can be made here
    run = open_run("rl", "job-nowhere")
    run.emit(step(1))
    journal_folder().unlink()
    run.emit(step(2))
    run.close("FINISHED")
    assert "MLflow will lack points of rl" in caplog.text
    assert points(client, run, "reward") == [(2, 2 / 500)]


@pytest.mark.parametrize(
    "lines, written",
    [
        ([{"process": "this"}], True),
        ([{"process": "ended"}], False),
        ([{"process": "this"}, {"close": "FINISHED"}], False),
        ([{"process": "this"}, {"points": [], "text": '{"close":' * 100}], True),
        ([{"process": "this"}, {"points": ["x" * 1000]}, {"close": "KILLED"}], False),
        ([{"process": "this"}, {"close": "KILLED"}, {"points": []}], True),
    ],
)
def test_first_and_last_line_tell_whether_more_may_come(
    tmp_path: Path, lines: list[dict[str, object]], written: bool
) -> None:
    processes = {"this": vars(Process.this()), "ended": ended_process()}
    lines[0]["process"] = processes[str(lines[0]["process"])]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert Journal(path).is_written() is written
    with path.open("a") as file:
        file.write('{"close": "FINI')  # cut off: it does not count
    assert Journal(path).is_written() is (lines[0]["process"] == processes["this"])
