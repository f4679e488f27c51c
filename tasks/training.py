"""The training stages. Each holds its whole loop, so weights stay in memory; a retry resumes from a checkpoint."""

from __future__ import annotations

from typing import Any

from prefect import task

from grpo_core.checkpoints import CheckpointStore
from grpo_core.config import GRPOConfig, SFTConfig
from grpo_core.results import TrainingResult
from tasks.monitoring import JobRef, ObservedStage, observed_stage
from tasks.settings import STAGE


@task(name="train-sft", **STAGE)
def train_sft(config: dict[str, Any], job: JobRef) -> dict[str, Any]:
    """Fine-tune a LoRA adapter; returns the training document."""
    from grpo_core import sft  # torch

    parsed = SFTConfig.parse(config)
    with observed_stage("sft", parsed, job, _begun(parsed)) as stage:
        return _finish(stage, sft.train_sft(parsed, stage.monitor), job)


@task(name="train-rl", **STAGE)
def train_rl(config: dict[str, Any], job: JobRef) -> dict[str, Any]:
    """Train a policy with GRPO; returns the training document."""
    from grpo_core import grpo  # torch

    parsed = GRPOConfig.parse(config)
    with observed_stage("rl", parsed, job, _begun(parsed)) as stage:
        return _finish(stage, grpo.train_grpo(parsed, stage.monitor), job)


def _begun(config: SFTConfig | GRPOConfig) -> str | None:
    """Id of the training run that the checkpoint folder holds already."""
    assert config.checkpoint_dir is not None
    latest = CheckpointStore(config.checkpoint_dir).latest()
    return latest.run_id if latest else None


def _finish(stage: ObservedStage, result: TrainingResult, job: JobRef) -> dict[str, Any]:
    document = result.model_copy(update={"job_id": job["id"]}).document()
    if result.status == "cancelled":
        stage.cancelled()
    stage.run.record(
        step=result.steps,
        metrics=result.metrics,
        tags={"digest": result.digest, "checkpoint_dir": result.checkpoint_dir},
        documents={"result.json": document},
    )
    return document
