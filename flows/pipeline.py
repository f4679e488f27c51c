"""The pipeline: preview, SFT, GRPO, the evaluations of base, warm start and policy, and the lift report."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prefect import flow

from flows.jobs import FLOW, Document, Job, Stopped, run_job, termination_stops
from grpo_core.config import EvaluatedPolicy, PipelineConfig
from grpo_core.results import PipelineResult
from tasks import evaluation, lift_report, preview, tracking, training
from tasks.places import inside


@flow(name="pipeline", **FLOW)
def pipeline(config: PipelineConfig) -> Any:
    """Train a policy and measure what it gained; returns the pipeline document.

    Args:
        config: What to train and evaluate, on what, and how.
    """
    return run_job("pipeline", config, _tracked)


def _tracked(job: Job, config: PipelineConfig) -> Document:
    """The chain, as one MLflow run in which those of the stages are nested."""
    params, tags = config.model_dump(mode="json"), {"prefect_flow_run_id": job.ref["flow_run_id"]}
    run = tracking.open_run("pipeline", job_id=job.id, params=params, tags=tags)
    job.ref["mlflow_parent"] = "pipeline"
    folder = config.checkpoint_dir or job.folder
    done: Document = {"job_id": job.id, "status": "completed", "checkpoint_dir": folder}
    status = "FAILED"
    try:
        with termination_stops():
            for outcome in _chain(job, config, folder, run):
                done |= outcome
            lift_report.record(run, done)
        status = "FINISHED"
    except Stopped as stopped:
        status = "KILLED"
        done |= {"status": "cancelled", "stop_reason": stopped.document["stop_reason"]}
        if "kind" in stopped.document:  # a training stage: its partial checkpoint can be resumed
            done[stopped.document["kind"]] = stopped.document
    finally:
        run.close(status)
    return PipelineResult(**done, mlflow_run_id=run.id, duration_s=job.duration_s).document()


def _chain(job: Job, config: PipelineConfig, folder: str, run: tracking.TrackedRun) -> Iterator[Document]:
    """Run the stages in order and give each one's part of the pipeline document."""
    yield {"preview": job.stage(preview.preview, config=config.model_dump(mode="json"))}

    sft_config = config.sft_stage(checkpoint_dir=inside(folder, "sft"))
    sft = job.stage(training.train_sft, config=sft_config.model_dump(mode="json"), job=job.ref)
    yield {"sft": sft}

    rl_config = config.rl_stage(init_checkpoint_dir=sft["checkpoint_dir"], checkpoint_dir=inside(folder, "rl"))
    rl = job.stage(training.train_rl, config=rl_config.model_dump(mode="json"), job=job.ref)
    yield {"rl": rl}

    subjects: dict[str, tuple[EvaluatedPolicy, str | None]] = {
        "base": ("base", None),
        "warm_start": (config.policy, sft["checkpoint_dir"]),
        "policy": (config.policy, rl["checkpoint_dir"]),
    }
    evaluations: dict[str, Document] = {}
    for name, (policy, checkpoint_dir) in subjects.items():
        stage = config.eval_stage(policy, checkpoint_dir).model_dump(mode="json")
        output_dir = inside(folder, "eval", name)
        evaluations[name] = job.stage(evaluation.evaluate, name=name, config=stage, output_dir=output_dir, job=job.ref)
        yield {"evaluations": evaluations}

    urls = {name: document["url"] for name, document in evaluations.items()}
    context = {
        "job_id": job.id,
        "config": config.model_dump(mode="json"),
        "sft": sft,
        "rl": rl,
        "mlflow_run_id": run.id,
    }
    yield job.stage(lift_report.lift_report, evaluation_urls=urls, output_dir=inside(folder, "report"), context=context)
