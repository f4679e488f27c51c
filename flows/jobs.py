"""A flow run as a job: its id and run folder, its stages, and how it stops.

A stage is a task in a thread of its own, and the flow's main thread waits for it. When a stop is wanted, the
stage saves a partial checkpoint, later stages do not start, and the flow returns `Cancelled` instead of crashing;
how a signal becomes such a wish is in `stopping.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, TypeVar
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext
from prefect.exceptions import TerminationSignal
from prefect.states import Cancelled
from prefect.task_runners import ThreadPoolTaskRunner
from prefect.tasks import Task

from flows.stopping import CancelTag, Interrupts
from grpo_core.compute.preview import admit
from grpo_core.config import EvalConfig, GRPOConfig, PipelineConfig, SFTConfig
from grpo_core.errors import LabError
from grpo_core.files import write_json
from grpo_core.processes import Process
from grpo_core.progress import Deadline, Monitor, StopReason
from tasks.monitoring import JobRef, StopFlag, watching
from tasks.places import CANCEL_TAG, CONFIG, JOB_TAG, PROCESS, RESULT, inside, job_id, located, run_folder

# Stages run one after the other; a second thread lets one start while another is still ending.
FLOW: dict[str, Any] = {
    "task_runner": ThreadPoolTaskRunner(max_workers=2),
    "log_prints": False,
    "persist_result": False,
    "result_serializer": "json",
}

Document = dict[str, Any]
C = TypeVar("C", SFTConfig, GRPOConfig, EvalConfig, PipelineConfig)


class Stopped(Exception):
    """A job ends early because a stop was wanted.

    Attributes:
        document: what the stopped stage returned; at least its `stop_reason`.
    """

    def __init__(self, document: Document):
        super().__init__(document["stop_reason"])
        self.document = document


class Job:
    """One flow run as a job.

    Attributes:
        id: see `tasks.places.job_id`.
        folder: where its resolved config and its result lie, and its checkpoints unless the config names another place.
        ref: what its stages are told of it.
    """

    def __init__(self, prefix: str):
        context = FlowRunContext.get()
        assert context is not None and context.flow_run is not None, "a job exists only within a flow run"
        flow_run = context.flow_run
        self.id = job_id(prefix, flow_run.created or datetime.now(UTC), flow_run.id)
        self.folder = run_folder(self.id)
        self.ref: JobRef = {"id": self.id, "flow_run_id": str(flow_run.id), "mlflow_parent": None}
        self.stop = StopFlag()
        self.interrupts = Interrupts(self.stop)
        self.asked = CancelTag(self.stop, flow_run.id)
        self._tags = flow_run.tags
        self._started = time.monotonic()

    def announce(self, kind: str) -> None:
        """Say who runs the job, and let its flow run be found by the job's id."""
        write_json(inside(self.folder, PROCESS), vars(Process.this()))
        tags = {*self._tags, JOB_TAG, kind} - {CANCEL_TAG}  # asked of an earlier attempt
        with get_client(sync_client=True) as client:
            client.update_flow_run(UUID(self.ref["flow_run_id"]), name=self.id, tags=tags)

    @property
    def duration_s(self) -> float:
        """Seconds since this attempt began."""
        return time.monotonic() - self._started

    def stage(self, task: Task[..., Document], **arguments: Any) -> Document:
        """Run one stage and wait for its document. A stage that ended is kept, whatever was asked for meanwhile.

        Raises:
            Stopped: the stage ended early, or a stop was wanted before it began.
            Exception: whatever the stage raised, after its retries.
        """
        if reason := self.stop.stop_requested():
            raise Stopped({"stop_reason": reason.value})
        document = self.interrupts.wait(task.submit(**arguments))
        if document.get("status") == "cancelled":
            raise Stopped(document)
        return document


@contextmanager
def termination_stops() -> Iterator[None]:
    """Outside a stage, a termination signal stops the job at once: nothing is unsaved there."""
    try:
        yield
    except TerminationSignal:
        raise Stopped({"stop_reason": StopReason.CANCELLED.value}) from None


def run_job(prefix: str, config: C, stages: Callable[[Job, C], Document]) -> Document | State[Any]:
    """Run the stages of a flow as a job, and keep its config and its result in the run folder.

    Args:
        stages: given the job and its resolved config, runs the stages and returns the job's result document.

    Returns:
        That document; or, when a stop was wanted, Prefect's `Cancelled` with a `Stopped` as its data: see `outcome`.

    Raises:
        LabError: the config cannot be honoured here, or a stage failed on purpose.
    """
    job = Job(prefix)
    job.announce(prefix)
    with job.interrupts, job.asked:
        resolved = located(config).resolved()
        write_json(inside(job.folder, CONFIG), resolved.model_dump(mode="json"))
        try:
            result = _result(job, resolved, stages)
        except Exception as error:
            write_json(inside(job.folder, RESULT), _failure(job, error))
            raise
        write_json(inside(job.folder, RESULT), result)
    if result["status"] == "cancelled":
        return Cancelled(message=_stop_message(result), data=Stopped(result))
    return result


def outcome(state: State[Any]) -> Document:
    """The result document of a flow that ended in `state`, run to its end or stopped.

    Raises:
        Exception: whatever the flow raised.
    """
    try:
        return state.result()
    except Stopped as stopped:
        return stopped.document


def _result(job: Job, config: C, stages: Callable[[Job, C], Document]) -> Document:
    admit(config)
    try:
        with watching(*_stoppers(job, config)), termination_stops():
            return stages(job, config)
    except Stopped as stopped:
        return {"job_id": job.id, **stopped.document, "status": "cancelled"}


def _failure(job: Job, error: Exception) -> Document:
    described = _described(error)
    stop_reason = StopReason.NO_SIGNAL.value if described["code"] == "NO_SIGNAL" else None
    return {"job_id": job.id, "status": "failed", "stop_reason": stop_reason, "error": described}


def _stoppers(job: Job, config: SFTConfig | GRPOConfig | EvalConfig | PipelineConfig) -> tuple[Monitor, ...]:
    """What may stop the job. The time ceiling is the whole job's, so its clock starts here and not with a stage."""
    hours = config.compute.max_duration_hours
    return (job.stop, Deadline(hours)) if hours else (job.stop,)


def _described(error: Exception) -> dict[str, str | None]:
    """An error as job documents show it; one that nobody raised on purpose has the code ``INTERNAL``."""
    if isinstance(error, LabError):
        return error.as_dict()
    return {"code": "INTERNAL", "message": f"{type(error).__name__}: {error}", "hint": None, "field": None}


def _stop_message(result: Document) -> str:
    """Why a job stopped, and the partial checkpoint that can be resumed or evaluated, if there is one."""
    trainings = (result, result.get("rl"), result.get("sft"))
    kept = next(
        (f"; partial checkpoint: {each['checkpoint_dir']}" for each in trainings if each and each.get("partial")), ""
    )
    return f"stopped ({result['stop_reason']}){kept}"
