"""The evaluation of one policy as a job of its own."""

from __future__ import annotations

from typing import Any

from prefect import flow

from flows.jobs import FLOW, Document, Job, run_job
from grpo_core.config import EvalConfig
from tasks import evaluation


@flow(name="eval-rl", **FLOW)
def eval_rl(config: EvalConfig) -> Any:
    """Score a policy on the eval split; returns the evaluation document without its items, and the URL of the whole.

    Args:
        config: What to score, on what, and how.
    """
    return run_job("eval", config, _stages)


def _stages(job: Job, config: EvalConfig) -> Document:
    document = config.model_dump(mode="json")
    return job.stage(evaluation.evaluate, name=config.policy, config=document, output_dir=job.folder, job=job.ref)
