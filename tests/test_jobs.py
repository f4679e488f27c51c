"""Jobs seen from outside, on a real Prefect API: found, asked to stop, and recognised as crashed."""

from __future__ import annotations

import json
import time
from pathlib import Path
from uuid import UUID

import pytest
from prefect.client.orchestration import get_client
from prefect.states import Running
from tracked import ended_process

import grpo_core.grpo
from flows import stopping
from flows.train_rl import train_rl
from grpo_core.config import GRPOConfig
from grpo_core.errors import NotFoundError
from grpo_core.processes import Process
from grpo_core.progress import Monitor
from grpo_core.results import TrainingResult
from lab.jobs import JobOver, cancel_job, get_job, list_jobs
from tasks.places import CANCEL_TAG, PROCESS

RL = GRPOConfig(family="smollm2-135m", policy="peft-lora")


@pytest.fixture
def lab_home(prefect_harness: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LAB_HOME", str(tmp_path))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    monkeypatch.setattr(stopping, "ASKED_EVERY_S", 0.05)
    return tmp_path


def trained(config: GRPOConfig, monitor: Monitor) -> TrainingResult:
    """Stands in for training: over at once, unless a stop is wanted."""
    assert config.checkpoint_dir is not None
    reason = monitor.stop_requested()
    return TrainingResult(
        kind="rl",
        status="cancelled" if reason else "completed",
        stop_reason=reason.value if reason else None,
        checkpoint_dir=config.checkpoint_dir,
        partial=reason is not None,
        steps=1,
        metrics={"loss": 1.0},
        digest="digest",
        initial_digest="initial",
        duration_s=0.1,
    )


def test_job_that_is_asked_to_stop_saves_and_is_cancelled(lab_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def waits(config: GRPOConfig, monitor: Monitor) -> TrainingResult:
        assert config.checkpoint_dir is not None
        job_id = Path(config.checkpoint_dir).name
        seen.extend([get_job(job_id)["status"], cancel_job(job_id)["status"]])
        while not monitor.stop_requested():
            time.sleep(0.01)
        return trained(config, monitor)

    monkeypatch.setattr(grpo_core.grpo, "train_grpo", waits)
    state = train_rl(RL, return_state=True)
    assert state.is_cancelled()
    assert seen == ["running", "cancelling"]
    job = get_job(str(state.state_details.flow_run_id))
    assert (job["kind"], job["status"], job["stop_reason"], job["partial"]) == ("train", "cancelled", "cancelled", True)
    assert job["config"]["policy"] == "peft-lora"
    assert job["checkpoint_dir"] == str(lab_home / "artifacts" / job["job_id"])
    assert job["job_id"] in [each["job_id"] for each in list_jobs()]
    with pytest.raises(JobOver, match="is cancelled already"):
        cancel_job(job["job_id"])
    with get_client(sync_client=True) as client:
        assert CANCEL_TAG in client.read_flow_run(UUID(job["flow_run_id"])).tags


def test_job_whose_process_is_gone_is_crashed_and_no_other(lab_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpo_core.grpo, "train_grpo", trained)
    flow_run_id = train_rl(RL, return_state=True).state_details.flow_run_id
    assert flow_run_id is not None
    job_id = get_job(str(flow_run_id))["job_id"]
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(UUID(str(flow_run_id)), Running(), force=True)
    assert get_job(job_id)["status"] == "running"  # this very process runs it

    ended = ended_process()
    assert Process(**ended).runs() is False
    (lab_home / "artifacts" / job_id / PROCESS).write_text(json.dumps(ended))
    job = get_job(job_id)
    assert (job["status"], job["message"]) == ("crashed", "the process that ran this job is gone")


def test_unknown_job_is_not_found(lab_home: Path) -> None:
    for name in ("train-1-00000000", "00000000-0000-0000-0000-000000000000"):
        with pytest.raises(NotFoundError, match="there is no job"):
            cancel_job(name)
