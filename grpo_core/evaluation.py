"""Evaluate a policy on an environment's problems.

The same problems, prompts and decoding for every policy: what two evaluations must share to be
compared is in `settings` and its hash. Comparing them is `lift.py`; what an interrupted one keeps is in
`unfinished.py`.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from grpo_core.chat import Chat
from grpo_core.checkpoints import policy_folder, policy_manifest
from grpo_core.config import EvalConfig
from grpo_core.environments.base import Environment, Problem
from grpo_core.environments.registry import make_environment
from grpo_core.errors import ConfigError, NotFoundError
from grpo_core.files import read_json, write_json
from grpo_core.lift import wilson_interval
from grpo_core.models import BaseModel, load_base_model, numeric_layout
from grpo_core.policies.base import BarePolicy, Policy, tensors_digest
from grpo_core.policies.peft_lora import PeftLoraPolicy
from grpo_core.progress import Monitor, Notice, StepEvent, raise_if_stopping
from grpo_core.results import EVALUATION_FILE, EvaluationResult, ItemResult
from grpo_core.sampling import Completion, SamplingSettings, TorchSampler, addressed_uniforms
from grpo_core.unfinished import FinishedBatches

BATCH_PROMPTS = 16
"""Prompts sampled together, and the unit of resuming.

A completion depends on its batch: sums round by the shape of the matrices, which loses a row whenever a completion
ends. So a batch that was interrupted is sampled again as a whole, even where some of its completions were done:
the rest without them, or gone on with from their tokens, would not be what an uninterrupted evaluation gives.
"""


def evaluate(config: EvalConfig, output_dir: str, monitor: Monitor, job_id: str | None = None) -> EvaluationResult:
    """Evaluate and store the result as ``evaluation.json`` in `output_dir`; a stored one is returned.

    An evaluation that was interrupted goes on behind its last finished batch: with the same settings, checkpoint and
    numeric layout, so that its items are those of an uninterrupted one.

    Raises:
        StopNow: a stop was wanted; only the finished batches are kept.
        ConfigError: a prompt does not fit, the environment repeats a problem, or the checkpoint is not there.
    """
    started = time.monotonic()
    config = config.resolved()
    assert config.max_new_tokens is not None and config.pass_threshold is not None
    environment = make_environment(config.environment, config.environment_options)
    problems = environment.problems(config.seed, "eval", config.num_tasks)
    _refuse_repeated(problems)
    base = load_base_model(config.family, config.model_dir, config.device, config.dtype)
    policy, digest, partial = _load_policy(config, base)
    settings = evaluation_settings(config, base)
    subject = {"settings_hash": settings_hash(settings), "checkpoint_digest": digest}
    finished = FinishedBatches(output_dir, {**subject, "layout": numeric_layout(base)})
    stored = _stored(output_dir)
    if stored and stored.model_dump(include=set(subject)) == subject:
        result = stored.model_copy(update={"partial": partial})  # a run may have gone on, or stopped, without a step
    else:
        items = score_problems(
            policy,
            environment,
            problems,
            max_new_tokens=config.max_new_tokens,
            temperature=config.temperature,
            pass_threshold=config.pass_threshold,
            seed=config.seed,
            samples=config.samples_per_problem,
            monitor=monitor,
            finished=finished,
        )
        result = EvaluationResult(
            job_id=job_id,
            family=config.family,
            environment=config.environment,
            policy=config.policy,
            checkpoint_dir=config.checkpoint_dir,
            partial=partial,
            num_tasks=config.num_tasks,
            pass_threshold=config.pass_threshold,
            settings=settings,
            duration_s=time.monotonic() - started,
            per_task=items,
            **subject,
            **summary(items),
        )
    if result != stored:
        write_json(f"{output_dir.rstrip('/')}/{EVALUATION_FILE}", result.document())
    try:
        finished.remove()
    except OSError as error:  # the result is whole all the same
        monitor.emit(Notice("warning", f"the batches of a finished evaluation could not be deleted: {error}"))
    return result


def validate(
    policy: Policy,
    environment: Environment,
    problems: Sequence[Problem],
    max_new_tokens: int,
    monitor: Monitor,
) -> dict[str, float]:
    """Greedy reward on these problems, as the metrics that training loops watch.

    Raises:
        StopNow: a stop was wanted.
    """
    items = score_problems(
        policy,
        environment,
        problems,
        max_new_tokens=max_new_tokens,
        temperature=0.0,
        pass_threshold=environment.pass_threshold,
        seed=0,
        samples=1,
        monitor=monitor,
    )
    figures = summary(items)
    return {"eval/reward": figures["mean_reward"], "eval/pass_rate": figures["pass_rate"]}


def score_problems(
    policy: Policy,
    environment: Environment,
    problems: Sequence[Problem],
    *,
    max_new_tokens: int,
    temperature: float,
    pass_threshold: float,
    seed: int,
    samples: int,
    monitor: Monitor,
    finished: FinishedBatches | None = None,
) -> list[ItemResult]:
    """Complete and score problems, in batches of prompts of like length; items come back in problem order.

    Args:
        finished: where finished batches are kept and taken up again; None keeps nothing.

    Raises:
        StopNow: a stop was wanted.
        ConfigError: a prompt does not fit into the context.
    """
    chat, sampler = Chat(policy.base), TorchSampler(policy.base)
    settings = SamplingSettings(max_new_tokens, temperature, chat.stop_ids)
    prompts = [chat.prompt_ids(policy.render(problem), max_new_tokens) for problem in problems]
    by_length = sorted(range(len(problems)), key=lambda i: (len(prompts[i]), i))
    batches = [by_length[i : i + BATCH_PROMPTS] for i in range(0, len(by_length), BATCH_PROMPTS)]
    digests = [_digest([(problems[i].id, prompts[i]) for i in batch]) for batch in batches]
    scored = finished.leading(digests) if finished else []
    if scored:
        monitor.emit(Notice("info", f"resuming the evaluation after batch {len(scored)} of {len(batches)}"))
    for batch, digest in list(zip(batches, digests, strict=True))[len(scored) :]:
        raise_if_stopping(monitor)
        uniforms = [addressed_uniforms(seed, 0, problems[i].index, 0, samples, max_new_tokens) for i in batch]
        sampled = sampler.sample(
            [prompts[i] for i in batch],
            policy.adapters([problems[i] for i in batch]),
            settings,
            np.stack(uniforms),
            between_tokens=lambda: raise_if_stopping(monitor),
        )
        scored.append(
            [
                _item(environment, problems[i], sample, chat.text(completion.ids), completion, pass_threshold)
                for i, group in zip(batch, sampled.groups, strict=True)
                for sample, completion in enumerate(group)
            ]
        )
        # Scores are kept with their completions: a judge may be slow, and one that fails may not fail again.
        if finished:
            finished.add(len(scored), digest, scored[-1])
        done = float(sum(map(len, batches[: len(scored)])))
        monitor.emit(StepEvent("eval", len(scored), len(batches), {"problems": done}))
    places = [i for batch in batches for i in batch for _ in range(samples)]
    items = [item for batch in scored for item in batch]
    return [item for _, item in sorted(zip(places, items, strict=True), key=lambda pair: pair[0])]


def summary(items: Sequence[ItemResult]) -> dict[str, Any]:
    """The figures over all items, failed ones counted as reward 0: fields of `EvaluationResult`.

    The interval of the pass rate counts problems: several samples of one are not independent.
    """
    problems = len({item.id for item in items})
    rewards = np.array([item.reward for item in items])
    passed = sum(item.passed for item in items)
    parts = sorted({name for item in items for name in item.parts})
    return {
        "mean_reward": float(rewards.mean()),
        "std_reward": float(rewards.std(ddof=1)) if len(rewards) > 1 else 0.0,
        "min_reward": float(rewards.min()),
        "max_reward": float(rewards.max()),
        "pass_rate": passed / len(items),
        "pass_rate_ci95": wilson_interval(passed / len(items) * problems, problems),
        "parts": {name: float(np.mean([item.parts.get(name, 0.0) for item in items])) for name in parts},
        "truncated": sum(item.truncated for item in items),
        "failed": sum(item.error is not None for item in items),
    }


def evaluation_settings(config: EvalConfig, base: BaseModel) -> dict[str, object]:
    """What two evaluations must share for their items to be comparable: everything but the policy."""
    shared = ("family", "environment", "environment_options", "seed", "num_tasks", "samples_per_problem")
    decoding = ("max_new_tokens", "temperature", "pass_threshold")
    numerics = {"split": "eval", "dtype": str(base.dtype).removeprefix("torch."), "weights": base.fingerprint}
    return {**config.model_dump(mode="json", include={*shared, *decoding}), **numerics}


def settings_hash(settings: dict[str, object]) -> str:
    """SHA-256 of the settings as canonical JSON, 16 hex digits."""
    return _digest(settings)[:16]


def read_evaluation(url: str) -> EvaluationResult:
    """An evaluation from its file, or from the folder that holds it.

    Raises:
        NotFoundError: there is none.
        ValueError: it is no evaluation document.
    """
    return EvaluationResult.model_validate(
        read_json(url if url.endswith(".json") else f"{url.rstrip('/')}/{EVALUATION_FILE}")
    )


def _stored(output_dir: str) -> EvaluationResult | None:
    try:
        return read_evaluation(output_dir)
    except (NotFoundError, ConfigError, ValueError):
        return None  # none yet, or its writer was killed


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _refuse_repeated(problems: Sequence[Problem]) -> None:
    distinct = len({problem.id for problem in problems})
    if distinct < len(problems):
        message = f"the environment has only {distinct} distinct problems at {len(problems)} places of its eval split"
        raise ConfigError(message, field="num_tasks", hint=f"evaluate at most {distinct}, or make its options harder")


def _load_policy(config: EvalConfig, base: BaseModel) -> tuple[Policy, str | None, bool]:
    """The policy, the digest of its adapter, and whether its run was stopped there."""
    if config.policy == "base":
        return BarePolicy(base), None, False
    assert config.checkpoint_dir is not None
    with policy_folder(config.checkpoint_dir) as folder:
        policy = PeftLoraPolicy.load(base, folder)
    digest = tensors_digest(policy.trainable_parameters())
    manifest = policy_manifest(config.checkpoint_dir)
    # of another digest is the manifest of a newer checkpoint, which a run that lives has just kept
    return policy, digest, manifest is not None and manifest.partial and manifest.digest == digest


def _item(
    environment: Environment, problem: Problem, sample: int, text: str, completion: Completion, pass_threshold: float
) -> ItemResult:
    score = environment.checked_score(problem, text)
    failed = isinstance(score, str)
    reward = 0.0 if isinstance(score, str) else score.reward
    parts = {} if isinstance(score, str) else dict(score.parts)
    return ItemResult(
        id=problem.id,
        index=problem.index,
        sample=sample,
        seed=problem.seed,
        depth=problem.metadata.get("depth"),
        blocks=problem.metadata.get("blocks"),
        completion=text,
        expected=problem.answer,
        reward=reward,
        parts={**parts, "truncated": float(completion.truncated)},
        passed=not failed and reward >= pass_threshold,
        tokens=len(completion.ids),
        truncated=completion.truncated,
        error=score if isinstance(score, str) else None,
    )
