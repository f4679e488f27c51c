"""The last stage: compare the evaluations and write the report."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from prefect import task
from prefect.artifacts import create_link_artifact, create_markdown_artifact

from grpo_core.files import read_json, read_text
from grpo_core.results import EvaluationResult
from tasks import tracking
from tasks.settings import STAGE

logger = logging.getLogger(__name__)


@task(name="lift-report", **STAGE)
def lift_report(evaluation_urls: dict[str, str], output_dir: str, context: dict[str, Any]) -> dict[str, Any]:
    """Write the lift report of a pipeline.

    Args:
        evaluation_urls: the evaluation documents of ``base``, ``warm_start`` and ``policy``.
        context: facts about the job that the report shows.

    Returns:
        ``{"lift": base to policy, "rl_lift": warm start to policy, "report": {format: url}}``.
    """
    from grpo_core.lift import compare  # scipy
    from grpo_core.report.lift_report import write_lift_report

    evaluations = {name: EvaluationResult.model_validate(read_json(url)) for name, url in evaluation_urls.items()}
    lift = compare(evaluations["base"], evaluations["policy"])
    rl_lift = compare(evaluations["warm_start"], evaluations["policy"])
    report = write_lift_report(output_dir, evaluations=evaluations, lift=lift, rl_lift=rl_lift, context=context)
    with _unless_prefect_is_away():
        create_markdown_artifact(
            read_text(report["markdown"]), key="lift-report", description=f"Lift report: {lift.verdict}"
        )
    return {"lift": lift.document(), "rl_lift": rl_lift.document(), "report": report}


def record(run: tracking.TrackedRun, pipeline: dict[str, Any]) -> None:
    """Put the lift and its report into the pipeline's MLflow run."""
    lift, rl_lift = pipeline["lift"], pipeline["rl_lift"]
    numbers = {f"lift/{key}": lift["lift"][key] for key in ("pass_rate", "p_value", "mean_reward")}
    low, high = lift["lift"]["ci95"]
    run.record(
        metrics={
            **numbers,
            "lift/ci95_low": low,
            "lift/ci95_high": high,
            "rl_lift/pass_rate": rl_lift["lift"]["pass_rate"],
        },
        tags={"verdict": lift["verdict"], "rl_verdict": rl_lift["verdict"], "digest": pipeline["rl"]["digest"]},
        documents={url.rsplit("/", 1)[-1]: read_text(url) for url in pipeline["report"].values()},
    )
    if run.link:
        with _unless_prefect_is_away():
            create_link_artifact(run.link, link_text="MLflow run", key="mlflow-run")


@contextmanager
def _unless_prefect_is_away() -> Iterator[None]:
    """What is shown in Prefect lies in files and in MLflow too: no reason to lose a job at its end."""
    try:
        yield
    except httpx.HTTPError as error:
        logger.warning("an artifact is not shown in Prefect: %s", error)
