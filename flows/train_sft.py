"""Supervised fine-tuning as a job of its own."""

from __future__ import annotations

from typing import Any

from prefect import flow

from flows.jobs import FLOW, Document, Job, run_job
from grpo_core.config import SFTConfig
from tasks import training


@flow(name="train-sft", **FLOW)
def train_sft(config: SFTConfig) -> Any:
    """Fine-tune a LoRA adapter; returns the training document.

    Args:
        config: What to train, on what, and how.
    """
    return run_job("sft", config, _stages)


def _stages(job: Job, config: SFTConfig) -> Document:
    stage = config.model_copy(update={"checkpoint_dir": config.checkpoint_dir or job.folder})
    return job.stage(training.train_sft, config=stage.model_dump(mode="json"), job=job.ref)
