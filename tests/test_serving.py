"""Submitted jobs, run by a real serving process of a real Prefect server: cancelled, killed, retried."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Cancelling
from servers import prefect_server
from tracked import wait_for

from grpo_core.checkpoints import CheckpointStore
from grpo_core.config import GRPOConfig
from grpo_core.files import read_json
from grpo_core.grpo import train_grpo
from grpo_core.progress import Silent
from grpo_core.results import TrainingResult
from lab.jobs import ENDED, NotServed, cancel_job, find_crashed, get_job, submit_job
from tasks.places import PROCESS, inside, run_folder

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent


eventually = partial(wait_for, within_s=120.0)


def ended(job_id: str) -> dict[str, Any]:
    return eventually(lambda: (job := get_job(job_id))["status"] in ENDED and job)


@contextmanager
def serving_jobs() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-m", "lab.serving"])  # one at a time
    try:
        yield process
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A Prefect server of its own; the folder of a lab that uses it."""
    folder = tmp_path_factory.mktemp("lab")
    with prefect_server(folder / "prefect") as prefect, pytest.MonkeyPatch.context() as environment:
        url = f"{prefect.url}/api"
        environment.setenv("PREFECT_HOME", str(folder / "prefect"))
        environment.setenv("PREFECT_API_URL", url)
        environment.setenv("LAB_HOME", str(folder))
        environment.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder / 'mlflow.db'}")
        environment.setenv("PYTHONPATH", f"{HERE.parent}{os.pathsep}{HERE}")
        with temporary_settings({PREFECT_API_URL: url}):
            yield folder


@pytest.fixture
def serving(server: Path) -> Iterator[None]:
    with serving_jobs():
        yield


@pytest.fixture
def long_run(tiny_model_dir: str, tmp_path: Path) -> Callable[[str], GRPOConfig]:
    """Makes configs of a GRPO run of some seconds, all alike, each in a folder of its own."""
    fields = {"family": "smollm2-135m", "model_dir": tiny_model_dir, "environment": "letters", "device": "cpu"}
    fields |= {"dtype": "float32", "policy": "peft-lora", "prompts": 120, "prompts_per_step": 2, "group_size": 4}
    fields |= {"lr": 1e-2, "checkpoint_every": 5}
    return lambda name: GRPOConfig.parse({**fields, "checkpoint_dir": str(tmp_path / name)})


@pytest.fixture
def expected(long_run: Callable[[str], GRPOConfig]) -> TrainingResult:
    """What the run gives when nobody disturbs it."""
    return train_grpo(long_run("undisturbed"), Silent())


def submit(config: GRPOConfig) -> str:
    """A job that is left to the serving process, as soon as that has made its deployments."""

    def try_it() -> dict[str, Any] | None:
        try:
            return submit_job(config)
        except NotServed:
            return None

    return eventually(try_it)["job_id"]


def under_way(job_id: str, store: CheckpointStore) -> None:
    """Wait until the job has kept a step."""
    eventually(lambda: (latest := store.latest()) is not None and latest.step > 0)
    assert get_job(job_id)["status"] == "running"


def test_a_submitted_job_cancelled_through_prefect_is_retried_to_the_same_end(
    serving: None, long_run: Callable[[str], GRPOConfig], expected: TrainingResult
) -> None:
    config = long_run("cancelled")
    assert config.checkpoint_dir is not None
    store = CheckpointStore(config.checkpoint_dir)
    job_id = submit(config)
    assert get_job(job_id)["checkpoint_dir"] == config.checkpoint_dir
    under_way(job_id, store)
    second = submit(long_run("second"))
    flow_run_id = UUID(get_job(job_id)["flow_run_id"])
    assert get_job(second)["status"] == "queued"  # one at a time
    assert cancel_job(second)["status"] == "cancelled"
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(flow_run_id, Cancelling())  # as the button of Prefect's pages does
    job = ended(job_id)
    assert (job["status"], job["stop_reason"], job["partial"]) == ("cancelled", "cancelled", True)
    latest = store.latest()
    assert latest is not None and latest.partial and 0 < latest.step < 60

    # The runner writes Cancelled a second time when it has seen the process end.
    eventually(lambda: get_job(job_id)["message"] == "Flow run was cancelled successfully.")
    subprocess.run([sys.executable, "-m", "prefect", "flow-run", "retry", str(flow_run_id)], check=True)
    eventually(lambda: get_job(job_id)["status"] != "cancelled")
    job = ended(job_id)
    assert (job["status"], job["partial"], job["result"]["steps"]) == ("completed", False, 60)
    assert job["result"]["digest"] == expected.digest != expected.initial_digest
    assert CheckpointStore(str(config.checkpoint_dir)).latest().partial is False  # type: ignore[union-attr]


def test_a_killed_job_is_crashed_and_its_next_start_resumes_it(
    serving: None, long_run: Callable[[str], GRPOConfig], expected: TrainingResult
) -> None:
    config = long_run("killed")
    assert config.checkpoint_dir is not None
    job_id = submit(config)
    under_way(job_id, CheckpointStore(config.checkpoint_dir))
    os.kill(read_json(inside(run_folder(job_id), PROCESS))["pid"], signal.SIGKILL)
    assert ended(job_id)["status"] == "crashed"
    job = ended(submit(config))
    assert (job["status"], job["result"]["digest"]) == ("completed", expected.digest)


def test_a_job_that_dies_with_its_serving_process_is_found(
    server: Path, long_run: Callable[[str], GRPOConfig], expected: TrainingResult
) -> None:
    config = long_run("lost")
    assert config.checkpoint_dir is not None
    with serving_jobs() as serving:
        job_id = submit(config)
        under_way(job_id, CheckpointStore(config.checkpoint_dir))
        serving.kill()
        os.kill(read_json(inside(run_folder(job_id), PROCESS))["pid"], signal.SIGKILL)
        serving.wait()
    with get_client(sync_client=True) as client:

        def state() -> str:
            flow_run = client.read_flow_runs(flow_run_filter=named(job_id))[0]
            assert flow_run.state is not None
            return flow_run.state.type.value

        assert state() == "RUNNING"  # nobody has looked
        with serving_jobs():
            eventually(lambda: state() == "CRASHED")
            assert find_crashed() == []
            assert ended(submit(config))["result"]["digest"] == expected.digest


def named(job_id: str) -> Any:
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName

    return FlowRunFilter(name=FlowRunFilterName(any_=[job_id]))
