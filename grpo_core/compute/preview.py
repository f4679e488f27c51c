"""What a job would do and what stands against it, without doing any of it. No torch here.

`admit` refuses a job that cannot run on this machine; `preview` reports the same refusals as blockers,
beside counts of what the job would sample. Prices and durations are not estimated in this version.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fsspec.implementations.local import LocalFileSystem

from grpo_core.checkpoints import CheckpointStore
from grpo_core.config import EvalConfig, GRPOConfig, PipelineConfig, SFTConfig
from grpo_core.continuation import LoopConfig, refuse_other_run
from grpo_core.environments.registry import environment_class
from grpo_core.errors import AdmissionRefused, ConfigError, LabError, NotFoundError
from grpo_core.files import opened_url
from grpo_core.results import Estimate, Issue, Preview, Statistics

JobConfig = SFTConfig | GRPOConfig | EvalConfig | PipelineConfig

BASIS = "counts only: durations, memory and prices are not estimated in this version; this machine costs 0"


def admit(config: JobConfig) -> None:
    """Refuse a valid config that this machine or its inputs cannot honour.

    Raises:
        ConfigError: the device is not there.
        AdmissionRefused: another machine is asked for.
        NotFoundError: a checkpoint or dataset that the config names does not exist.
    """
    for error in _refusals(config):
        raise error


def preview(config: JobConfig) -> Preview:
    """The plan of a valid config. Launches nothing and writes nothing."""
    resolved = config.resolved().model_dump(mode="json")
    blockers = [_issue(error) for error in _refusals(config)]
    statistics, warnings = _statistics(config)
    return Preview(
        launchable=not blockers,
        plan_hash=hashlib.sha256(json.dumps(resolved, sort_keys=True).encode()).hexdigest(),
        config=resolved,
        compute=resolved["compute"],
        estimate=_estimate(config),
        statistics=statistics,
        blockers=blockers,
        warnings=warnings,
    )


def refused(request: dict[str, Any], error: LabError) -> Preview:
    """The preview of a request that is no valid config: `error` is its blocker."""
    compute = request.get("compute")
    return Preview(
        launchable=False,
        plan_hash=None,
        config=request,
        compute=compute if isinstance(compute, dict) else {},
        estimate=None,
        statistics=Statistics(),
        blockers=[_issue(error)],
        warnings=[],
    )


def check_device(device: str) -> None:
    """Refuse a device that this machine cannot have, judged without torch (which checks again when it loads).

    Raises:
        ConfigError: `metal` outside macOS, or `cuda` without an NVIDIA driver.
    """
    hint = "use device 'auto' to take the best there is"
    if device == "metal" and platform.system() != "Darwin":
        raise ConfigError(
            f"'metal' needs macOS, this is {platform.system()}", field="device", hint=hint, code="DEVICE_MISSING"
        )
    if device == "cuda" and not _has_nvidia_driver():
        raise ConfigError(
            "'cuda' needs an NVIDIA driver, none is loaded", field="device", hint=hint, code="DEVICE_MISSING"
        )


def _has_nvidia_driver() -> bool:
    if Path("/proc/driver/nvidia/version").exists():
        return True
    library = "nvcuda.dll" if platform.system() == "Windows" else "libcuda.so.1"
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _refusals(config: JobConfig) -> Iterator[LabError]:
    yield from _refused(check_device, config.device)
    for name in ("offer", "region", "gpus", "spot", "provider"):
        if value := getattr(config.compute, name):
            yield AdmissionRefused(
                f"{value!r}: there are no offers in this version",
                field=f"compute.{name}",
                hint="leave it out to run on this machine",
                code="OFFER_NOT_FOUND",
            )
    if config.checkpoint_dir is not None:
        unknown = list(_refused(opened_url, config.checkpoint_dir, "checkpoint_dir"))
        yield from unknown
        if unknown:  # nothing below could look into it
            return
    for field, url in _inputs(config).items():
        yield from _refused(_refuse_missing, field, url)
    for run in _runs(config):
        yield from _refused(_refuse_folder, run)


def _refused(check: Callable[..., object], *arguments: Any) -> Iterator[LabError]:
    """The error that a check raises, as an item."""
    try:
        check(*arguments)
    except LabError as error:
        yield error


def _inputs(config: JobConfig) -> dict[str, str]:
    """URLs that the job reads, by the field that names them. A run that has begun needs its initial adapter no more."""
    match config:
        case SFTConfig():
            named = {"dataset": config.dataset}
            named |= {} if _has_begun(config) else {"init_adapter_dir": config.init_adapter_dir}
        case GRPOConfig():
            named = {} if _has_begun(config) else {"init_checkpoint_dir": config.init_checkpoint_dir}
        case EvalConfig():
            named = {"checkpoint_dir": config.checkpoint_dir}
        case PipelineConfig():
            named = {"sft.init_adapter_dir": config.sft.init_adapter_dir, "sft.dataset": config.sft.dataset}
    return {field: url for field, url in named.items() if url is not None}


def _has_begun(config: LoopConfig) -> bool:
    return config.checkpoint_dir is not None and CheckpointStore(config.checkpoint_dir).latest() is not None


def _runs(config: JobConfig) -> list[LoopConfig]:
    """The training runs of a job whose folders the request itself names."""
    match config:
        case SFTConfig() | GRPOConfig():
            return [config] if config.checkpoint_dir else []
        case PipelineConfig(checkpoint_dir=str(folder)):
            sft = CheckpointStore(f"{folder.rstrip('/')}/sft").url
            rl = CheckpointStore(f"{folder.rstrip('/')}/rl").url
            return [config.sft_stage(checkpoint_dir=sft), config.rl_stage(init_checkpoint_dir=sft, checkpoint_dir=rl)]
        case _:
            return []


def _refuse_missing(field: str, url: str) -> None:
    filesystem, path = opened_url(url, field)
    if not filesystem.exists(path):
        raise NotFoundError(f"there is nothing at {url!r}", field=field)


def _refuse_folder(run: LoopConfig) -> None:
    """Refuse a checkpoint folder that cannot be written, or that holds another run."""
    assert run.checkpoint_dir is not None
    filesystem, path = opened_url(run.checkpoint_dir, "checkpoint_dir")
    if isinstance(filesystem, LocalFileSystem):
        existing = next(place for place in (Path(path), *Path(path).parents) if place.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK):
            message = f"{run.checkpoint_dir!r} cannot be written: {str(existing)!r} is no folder that may be written to"
            raise ConfigError(message, field="checkpoint_dir", hint="choose another folder")
    refuse_other_run(CheckpointStore(run.checkpoint_dir), run.resolved())


def _issue(error: LabError) -> Issue:
    return Issue(**error.as_dict())  # type: ignore[arg-type]  # code is never None


def _estimate(config: JobConfig) -> Estimate:
    estimates = list(_stage_estimates(config))
    steps = [estimate.steps for estimate in estimates]
    return Estimate(
        steps=None if None in steps else sum(step for step in steps if step is not None),
        prompts=sum(estimate.prompts for estimate in estimates),
        rollouts=sum(estimate.rollouts for estimate in estimates),
        tokens=sum(estimate.tokens for estimate in estimates),
        cost_ceiling_gbp=config.compute.max_cost_gbp,
        basis=BASIS,
    )


def _stage_estimates(config: JobConfig) -> Iterator[Estimate]:
    match config.resolved():
        case PipelineConfig() as job:
            yield from _stage_estimates(job.sft_stage(checkpoint_dir=None))
            yield from _stage_estimates(job.rl_stage(init_checkpoint_dir=None, checkpoint_dir=None))
            for _ in ("base", "warm_start", "policy"):
                yield from _stage_estimates(job.eval_stage("base", None))
        case SFTConfig() as job:
            budget = environment_class(job.environment).max_new_tokens
            steps = None if job.dataset else math.ceil(job.examples / job.examples_per_step) * job.epochs
            yield _counts(steps, job.eval_examples, 1, budget)
        case GRPOConfig() as job:
            steps = math.ceil(job.prompts / job.prompts_per_step)
            yield _counts(
                steps, job.prompts * (1 + job.resample_zero_variance), job.group_size, job.max_new_tokens or 0
            )
            if job.eval_every:
                evaluations = len({0, *range(job.eval_every, steps, job.eval_every), steps})
                yield _counts(0, evaluations * job.eval_prompts, 1, job.max_new_tokens or 0)
        case EvalConfig() as job:
            yield _counts(0, job.num_tasks, job.samples_per_problem, job.max_new_tokens or 0)


def _counts(steps: int | None, prompts: int, completions_each: int, tokens_each: int) -> Estimate:
    rollouts = prompts * completions_each
    return Estimate(steps=steps, prompts=prompts, rollouts=rollouts, tokens=rollouts * tokens_each, basis=BASIS)


def _statistics(config: JobConfig) -> tuple[Statistics, list[Issue]]:
    """What the planned evaluation can show, and a warning when that is too little."""
    match config:
        case PipelineConfig():
            field, problems = "eval.num_tasks", config.eval.num_tasks
        case EvalConfig():
            field, problems = "num_tasks", config.num_tasks
        case _:
            return Statistics(), []
    from grpo_core.lift import MIN_EFFECT, smallest_detectable_lift  # numpy: only when a preview is asked for

    detectable = smallest_detectable_lift(problems)
    statistics = Statistics(smallest_detectable_lift=detectable)
    if detectable <= MIN_EFFECT:
        return statistics, []
    message = (
        f"{problems} problems can show a lift of {detectable:.3f} or more; below that a verdict is not to be expected"
    )
    hint = "evaluate more problems to see smaller lifts"
    return statistics, [Issue(code="UNDERPOWERED", field=field, message=message, hint=hint)]
