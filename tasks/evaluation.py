"""The evaluation stage: score one policy on the eval split, and keep every item in a file."""

from __future__ import annotations

from typing import Any

from prefect import task

from grpo_core.config import EvalConfig
from grpo_core.progress import StopNow
from tasks.monitoring import JobRef, observed_stage
from tasks.places import inside
from tasks.settings import STAGE

FILE = "evaluation.json"


@task(name="evaluate", **STAGE)
def evaluate(name: str, config: dict[str, Any], output_dir: str, job: JobRef) -> dict[str, Any]:
    """Evaluate one policy.

    Args:
        name: which policy of the job this is: ``policy``, or ``base`` and ``warm_start`` in a pipeline.

    Returns:
        The evaluation document without its items, and the `url` of the whole one; or, when a stop was
        wanted, only ``{"status": "cancelled", "stop_reason"}``.
    """
    from grpo_core import evaluation  # torch

    parsed = EvalConfig.parse(config)
    with observed_stage(f"eval-{name}", parsed, job) as stage:
        try:
            result = evaluation.evaluate(parsed, output_dir, stage.monitor)
        except StopNow as stop:
            stage.cancelled()
            return {"status": "cancelled", "stop_reason": stop.reason.value}
        document = result.model_copy(update={"job_id": job["id"]}).document()
        numbers = {key: document[key] for key in ("mean_reward", "std_reward", "pass_rate", "truncated", "failed")}
        parts = {f"rewards/{part}": value for part, value in result.parts.items()}
        stage.record(
            metrics={**numbers, **parts}, tags={"settings_hash": result.settings_hash}, documents={FILE: document}
        )
        del document["per_task"]
        return {"status": "completed", **document, "url": inside(output_dir, FILE)}
