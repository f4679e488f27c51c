"""Reinforcement learning with GRPO as a job of its own."""

from __future__ import annotations

from typing import Any

from prefect import flow

from flows.jobs import FLOW, Document, Job, run_job
from grpo_core.config import GRPOConfig
from tasks import training


@flow(name="train-rl", **FLOW)
def train_rl(config: GRPOConfig) -> Any:
    """Train a policy with GRPO; returns the training document.

    Args:
        config: What to train, on what, and how.
    """
    return run_job("train", config, _stages)


def _stages(job: Job, config: GRPOConfig) -> Document:
    stage = config.model_copy(update={"checkpoint_dir": config.checkpoint_dir or job.folder})
    return job.stage(training.train_rl, config=stage.model_dump(mode="json"), job=job.ref)
