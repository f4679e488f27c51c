"""The evaluation stage: score one policy on the eval split, and keep every item in a file."""

from __future__ import annotations

from typing import Any

from prefect import task

from grpo_core.config import EvalConfig
from grpo_core.progress import StopNow
from grpo_core.results import EVALUATION_FILE
from tasks.monitoring import JobRef, Named, observed_stage
from tasks.places import inside
from tasks.settings import STAGE


@task(name="evaluate", task_run_name="evaluate-{name}", **STAGE)
def evaluate(name: str, config: dict[str, Any], output_dir: str, job: JobRef) -> dict[str, Any]:
    """Evaluate one policy.

    Args:
        name: which policy of the job this is, such as ``base`` or ``warm_start``; watchers see ``eval-<name>``.

    Returns:
        The evaluation document without its items, and the `url` of the whole one; or, when a stop was
        wanted, only ``{"status": "cancelled", "stop_reason"}``.
    """
    from grpo_core import evaluation  # torch

    parsed = EvalConfig.parse(config)
    stage_name = f"eval-{name}"
    with observed_stage(stage_name, parsed, job) as stage:
        try:
            result = evaluation.evaluate(parsed, output_dir, Named(stage_name, stage.monitor), job_id=job["id"])
        except StopNow as stop:
            stage.cancelled()
            return {"status": "cancelled", "stop_reason": stop.reason.value}
        document = result.document()
        numbers = {key: document[key] for key in ("mean_reward", "std_reward", "pass_rate", "truncated", "failed")}
        parts = {f"rewards/{part}": value for part, value in result.parts.items()}
        stage.run.record(
            metrics={**numbers, **parts},
            tags={"settings_hash": result.settings_hash, "partial": str(result.partial).lower()},
            documents={EVALUATION_FILE: document},
        )
        del document["per_task"]
        return {"status": "completed", **document, "url": inside(output_dir, EVALUATION_FILE)}
