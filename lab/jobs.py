"""Jobs as others see them. The one door module that asks the Prefect API: a job is a flow run and its run folder.

Prefect knows whether a job runs; its resolved config, its result and the process that runs it are files in the
run folder. Nothing else is stored. What runs submitted jobs is `serving.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import UUID

from grpo_core.compute.preview import JobConfig, admit
from grpo_core.config import EvalConfig, GRPOConfig, PipelineConfig, SFTConfig
from grpo_core.errors import ConfigError, LabError, NotFoundError
from grpo_core.files import read_json
from grpo_core.processes import Process
from tasks.places import CANCEL_TAG, CONFIG, JOB_TAG, PROCESS, RESULT, inside, job_id, located, run_folder

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun

DEPLOYMENT = "lab"
"""Name of the deployment of every flow."""

KINDS: dict[type[JobConfig], tuple[str, str]] = {
    PipelineConfig: ("pipeline", "pipeline"),
    SFTConfig: ("sft", "train_sft"),
    GRPOConfig: ("train", "train_rl"),
    EvalConfig: ("eval", "eval_rl"),
}
"""Of each config, the kind of its jobs, and the name of its flow's function and module in `flows`."""

STATUSES = {
    "SCHEDULED": "queued",
    "PENDING": "queued",
    "RUNNING": "running",
    "PAUSED": "queued",
    "CANCELLING": "cancelling",
    "CANCELLED": "cancelled",
    "COMPLETED": "completed",
    "FAILED": "failed",
    "CRASHED": "crashed",
}
ENDED = ("cancelled", "completed", "failed", "crashed")


class JobOver(LabError):
    """What was asked of a job is possible only while it has not ended."""

    code = "JOB_OVER"


class NotServed(LabError):
    """No process serves the flows, so a submitted job would never run."""

    code = "NOT_SERVED"


def submit_job(config: JobConfig) -> dict[str, Any]:
    """Leave a job to the serving process.

    Returns:
        The job, as it is now.

    Raises:
        LabError: the config cannot be honoured here; or nothing serves its flow (`NotServed`).
    """
    from prefect.exceptions import ObjectNotFound

    kind, flow = KINDS[type(config)]
    deployment_name = f"{flow.replace('_', '-')}/{DEPLOYMENT}"
    config = located(config).resolved()
    admit(config)
    with _client() as client:
        try:
            deployment = client.read_deployment_by_name(deployment_name)
        except ObjectNotFound:
            message = f"the Prefect API has no deployment {deployment_name}"
            raise NotServed(message, hint="start a serving process: python -m lab.serving") from None
        run = client.create_flow_run_from_deployment(
            deployment.id, parameters={"config": config.model_dump(mode="json")}, tags=[JOB_TAG, kind]
        )
        assert run.created is not None
        client.update_flow_run(run.id, name=job_id(kind, run.created, run.id))
        return _record(client, client.read_flow_run(run.id))


def list_jobs(limit: int = 50) -> list[dict[str, Any]]:
    """The newest jobs, without configs and results."""
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterTags
    from prefect.client.schemas.sorting import FlowRunSort

    with _client() as client:
        runs = client.read_flow_runs(
            flow_run_filter=FlowRunFilter(tags=FlowRunFilterTags(all_=[JOB_TAG])),
            sort=FlowRunSort.START_TIME_DESC,
            limit=limit,
        )
        return [_record(client, run) for run in runs]


def get_job(job_id: str) -> dict[str, Any]:
    """One job with its config and its result.

    Raises:
        NotFoundError: there is none of that id.
    """
    with _client() as client:
        run = _find(client, job_id)
        record = _record(client, run)
        for name, file in (("config", CONFIG), ("result", RESULT)):
            record[name] = _document(run.name, file)
        return record


def cancel_job(job_id: str, force: bool = False) -> dict[str, Any]:
    """Ask a job to stop; it saves what is finished first.

    Args:
        force: use Prefect's own cancellation, which kills the process when it has not ended after 30 s.

    Returns:
        The job, as it is now.

    Raises:
        NotFoundError: there is none of that id.
        JobOver: it has ended.
    """
    from prefect.states import Cancelled, Cancelling

    with _client() as client:
        run = _find(client, job_id)
        record = _record(client, run)
        if record["status"] in ENDED:
            raise JobOver(f"{job_id} is {record['status']} already", field="job_id")
        if record["status"] == "queued":
            client.set_flow_run_state(run.id, Cancelled(message="cancelled before it began"))
        else:
            client.update_flow_run(run.id, tags={*run.tags, CANCEL_TAG})
            if force:
                client.set_flow_run_state(run.id, Cancelling())
        return _record(client, client.read_flow_run(run.id))


def find_crashed() -> list[str]:
    """Make every job Crashed whose process is gone, and give their ids.

    Only a process of this machine is known to be gone; what another machine runs is judged by its heartbeats.
    """
    from prefect.client.schemas.filters import (
        FlowRunFilter,
        FlowRunFilterState,
        FlowRunFilterStateType,
        FlowRunFilterTags,
    )
    from prefect.client.schemas.objects import StateType

    running = FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.RUNNING, StateType.CANCELLING]))
    wanted = FlowRunFilter(tags=FlowRunFilterTags(all_=[JOB_TAG]), state=running)
    with _client() as client:
        records = [_record(client, run) for run in client.read_flow_runs(flow_run_filter=wanted)]
    return [record["job_id"] for record in records if record["status"] == "crashed"]


def _client() -> SyncPrefectClient:
    from prefect.client.orchestration import get_client

    return get_client(sync_client=True)


def _find(client: SyncPrefectClient, job_id: str) -> FlowRun:
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId, FlowRunFilterName, FlowRunFilterTags

    try:
        wanted = FlowRunFilter(id=FlowRunFilterId(any_=[UUID(job_id)]))
    except ValueError:
        wanted = FlowRunFilter(name=FlowRunFilterName(any_=[job_id]), tags=FlowRunFilterTags(all_=[JOB_TAG]))
    found = client.read_flow_runs(flow_run_filter=wanted, limit=1)
    if not found:
        raise NotFoundError(f"there is no job {job_id!r}", field="job_id", hint="`lab jobs list` shows them")
    return found[0]


def _record(client: SyncPrefectClient, run: FlowRun) -> dict[str, Any]:
    """The job record without config and result; a run whose process is gone is made Crashed first."""
    if run.state_type is not None and run.state_type.value in ("RUNNING", "CANCELLING") and _is_gone(run):
        from prefect.states import Crashed

        newest = client.read_flow_run(run.id)
        if newest.state_type == run.state_type:  # else it ended between the two looks
            client.set_flow_run_state(run.id, Crashed(message="the process that ran this job is gone"), force=True)
        run = client.read_flow_run(run.id)
    status = STATUSES[run.state_type.value] if run.state_type else "queued"
    if status == "running" and CANCEL_TAG in run.tags:
        status = "cancelling"
    result = _document(run.name, RESULT) or {}
    return {
        "job_id": run.name,
        "flow_run_id": str(run.id),
        "kind": run.name.split("-")[0],
        "status": status,
        "stop_reason": result.get("stop_reason"),
        "message": run.state.message if run.state else None,
        "created_at": _iso(run.created),
        "started_at": _iso(run.start_time),
        "ended_at": _iso(run.end_time),
        "checkpoint_dir": result.get("checkpoint_dir") or _checkpoint_dir(run),
        "partial": result.get("partial", False),
        "error": result.get("error"),
    }


def _checkpoint_dir(run: FlowRun) -> str:
    """Where a job keeps its checkpoints, as its config says; Prefect's copy of that is all there is before it runs."""
    config = _document(run.name, CONFIG) or run.parameters.get("config") or {}
    return config.get("checkpoint_dir") or run_folder(run.name)


def _is_gone(run: FlowRun) -> bool:
    process = _document(run.name, PROCESS)
    return process is not None and Process(**process).runs() is False


def _document(job_id: str, file: str) -> dict[str, Any] | None:
    try:
        return read_json(inside(run_folder(job_id), file))
    except (NotFoundError, ValueError, ConfigError):
        return None


def _iso(moment: Any) -> str | None:
    return moment.isoformat() if moment is not None else None
