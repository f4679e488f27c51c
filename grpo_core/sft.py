"""Supervised fine-tuning of a plain LoRA adapter.

Loss on the completion's tokens only, its end-of-turn token included; mean over the step's tokens.
Examples are generated from the environment's ``train`` split (stream ``sft``), or read from a JSONL.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from grpo_core.chat import Chat, Messages
from grpo_core.checkpoints import CheckpointStore
from grpo_core.config import SFTConfig
from grpo_core.continuation import stored_result
from grpo_core.environments.base import Problem, Split
from grpo_core.environments.registry import make_environment
from grpo_core.errors import ConfigError
from grpo_core.evaluation import validate
from grpo_core.files import read_text
from grpo_core.logprobs import token_logprobs
from grpo_core.models import load_base_model
from grpo_core.policies.adapters import AdapterBatch, applied
from grpo_core.policies.peft_lora import PeftLoraPolicy
from grpo_core.policies.starting import input_digests, start_policy
from grpo_core.progress import Monitor, raise_if_stopping
from grpo_core.results import TrainingResult
from grpo_core.training import StepResult, TrainingRun

MICRO_BATCH = 8
"""Examples per forward and backward pass."""

_ROW = 'each line needs "completion" and either "prompt" or "messages" with "role" and "content"'


@dataclass(frozen=True)
class Example:
    """Token ids of a prompt and of the completion to learn, and the problem it came from, if any."""

    prompt: list[int]
    completion: list[int]
    problem: Problem | None


def train_sft(config: SFTConfig, monitor: Monitor) -> TrainingResult:
    """Train, resume, or return the result of a finished run in ``config.checkpoint_dir``.

    Raises:
        ConfigError: the dataset is empty or wrong, or a prompt does not fit into the context.
        CheckpointConflict: the folder belongs to another run.
        TrainingFailed: the policy did not change, or a number was not finite.
    """
    config = config.resolved()
    assert config.checkpoint_dir is not None
    store = CheckpointStore(config.checkpoint_dir)
    init, init_field = config.init_adapter_dir, "init_adapter_dir"
    inputs = input_digests(store, config, init, init_field)
    if config.dataset is not None:
        inputs["content of dataset"] = hashlib.sha256(read_text(config.dataset).encode()).hexdigest()
    if finished := stored_result(store, config, inputs):
        return finished
    base = load_base_model(config.family, config.model_dir, config.device, config.dtype)
    policy = start_policy(base, store, init, init_field, config.lora_rank, config.lora_alpha, config.seed)
    trained, held_out = _examples(config, policy)
    cohort = _cohort(config, trained, held_out)
    run = TrainingRun(
        "sft",
        config,
        policy,
        store,
        monitor,
        items=len(trained) * config.epochs,
        per_step=config.examples_per_step,
        inputs=inputs,
        micro_batch=MICRO_BATCH,
        log_every=config.log_every,
    )

    def step(number: int, items: range) -> StepResult:
        started = time.monotonic()
        batch = [trained[_order(len(trained), item, config.seed)] for item in items]
        leaves = policy.leaf_adapters([])
        loss = _backward(policy, leaves, batch, monitor) + _l1_backward(leaves, config.l1_coef)
        policy.backward(leaves)
        metrics = {"loss": loss, **run.update(number), "time/train": time.monotonic() - started}
        return StepResult(metrics, sum(len(example.prompt) + len(example.completion) for example in batch))

    def validated() -> dict[str, float]:
        return _validate(config, policy, cohort, monitor)

    with run:
        return run.execute(step, validated if cohort else None)


def _order(count: int, item: int, seed: int) -> int:
    """The example at a position of the run: as given in the first epoch, shuffled by address in later ones."""
    epoch, place = divmod(item, count)
    if epoch == 0:
        return place
    return _permutation(count, seed, epoch)[place]


@cache  # asked for once per example
def _permutation(count: int, seed: int, stream: int) -> list[int]:
    """A shuffle of range(count), from its address alone."""
    return np.random.Generator(np.random.Philox(key=[seed, stream])).permutation(count).tolist()


def _backward(policy: PeftLoraPolicy, leaves: AdapterBatch, batch: Sequence[Example], monitor: Monitor) -> float:
    """Accumulate gradients of the mean negative log-likelihood over the step's tokens; returns that mean."""
    tokens = sum(len(example.completion) for example in batch)
    total = 0.0
    for start in range(0, len(batch), MICRO_BATCH):
        raise_if_stopping(monitor)
        groups = [(e.prompt, [e.completion]) for e in batch[start : start + MICRO_BATCH]]
        with applied(policy.base.model, leaves):
            loss = -token_logprobs(policy.base, groups).sum() / tokens
            loss.backward()
        total += float(loss.detach())
    return total


def _l1_backward(leaves: AdapterBatch, coefficient: float) -> float:
    """Accumulate gradients of the mean absolute LoRA weight times its coefficient; returns the term."""
    if coefficient == 0:
        return 0.0
    weights = [*leaves.a.values(), *leaves.b.values()]
    count = sum(w.numel() for w in weights)
    penalty = coefficient * torch.stack([w.abs().sum() for w in weights]).sum() / count
    penalty.backward()
    return float(penalty.detach())


def _examples(config: SFTConfig, policy: PeftLoraPolicy) -> tuple[list[Example], list[Example]]:
    """Examples to train on and examples held out."""
    chat = Chat(policy.base)
    if config.dataset is not None:
        return _dataset(config, chat)
    environment = make_environment(config.environment, config.environment_options)

    def generated(split: Split, count: int) -> list[Example]:
        examples = []
        for problem in environment.problems(config.seed, split, count, stream="sft"):
            completion = chat.completion_ids(problem.answer)
            examples.append(Example(chat.prompt_ids(policy.render(problem), len(completion)), completion, problem))
        return examples

    return generated("train", config.examples), generated("validation", config.eval_examples)


def _dataset(config: SFTConfig, chat: Chat) -> tuple[list[Example], list[Example]]:
    assert config.dataset is not None
    lines = [line for line in read_text(config.dataset).splitlines() if line.strip()]
    if not lines:
        raise ConfigError(
            f"{config.dataset!r} is empty", field="dataset", hint="give one JSON object per line", code="DATASET_EMPTY"
        )
    examples = []
    for number, line in enumerate(lines, start=1):
        messages, answer = _row(line, f"{config.dataset}:{number}")
        completion = chat.completion_ids(answer)
        examples.append(Example(chat.prompt_ids(messages, len(completion)), completion, None))
    order = _permutation(len(examples), config.split_seed, 0)
    # A ratio below 1 holds something out, and something is always trained on, however few examples there are.
    most = len(examples) if config.split_ratio == 1 else len(examples) - 1
    cut = max(1, min(most, round(config.split_ratio * len(examples))))
    shuffled = [examples[i] for i in order]
    return shuffled[:cut], shuffled[cut:]


def _row(line: str, where: str) -> tuple[Messages, str]:
    """One line of a dataset: ``prompt`` or ``messages``, and ``completion``."""
    try:
        row = json.loads(line)
        completion = row["completion"]
        messages = row["messages"] if "messages" in row else [{"role": "user", "content": row["prompt"]}]
        texts = [completion, *(message[key] for message in messages for key in ("role", "content"))]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{where}: {type(error).__name__}: {error}", field="dataset", hint=_ROW) from None
    if not messages or not all(isinstance(text, str) for text in texts) or not completion:
        raise ConfigError(f"{where}: prompt, messages and completion must be text", field="dataset", hint=_ROW)
    return [{"role": message["role"], "content": message["content"]} for message in messages], completion


def _cohort(config: SFTConfig, trained: Sequence[Example], held_out: Sequence[Example]) -> list[Example]:
    """The examples evaluated after training: `eval_examples` of the chosen cohort, drawn by address.

    Raises:
        ConfigError: the cohort is empty, so that nothing could be evaluated.
    """
    if config.eval_examples == 0:
        return []
    cohort = {"held_out": [*held_out], "train": [*trained], "all": [*held_out, *trained]}[config.eval_cohort]
    if not cohort:
        hint = "lower split_ratio, evaluate the cohort 'train', or set eval_examples to 0"
        raise ConfigError(f"no example is in the cohort {config.eval_cohort!r}", field="eval_cohort", hint=hint)
    order = _permutation(len(cohort), config.split_seed, 1)
    return [cohort[place] for place in order[: config.eval_examples]]


def _validate(
    config: SFTConfig, policy: PeftLoraPolicy, cohort: Sequence[Example], monitor: Monitor
) -> dict[str, float]:
    """Loss, and reward where the environment knows it."""
    metrics = {"eval/loss": _mean_loss(policy, cohort)}
    problems = [example.problem for example in cohort if example.problem is not None]
    if problems:
        environment = make_environment(config.environment, config.environment_options)
        metrics |= validate(policy, environment, problems, environment.max_new_tokens, monitor)
    return metrics


@torch.no_grad()
def _mean_loss(policy: PeftLoraPolicy, examples: Sequence[Example]) -> float:
    total = 0.0
    with applied(policy.base.model, policy.adapters([])):
        for start in range(0, len(examples), MICRO_BATCH):
            groups = [(e.prompt, [e.completion]) for e in examples[start : start + MICRO_BATCH]]
            total -= float(token_logprobs(policy.base, groups).sum())
    return total / sum(len(example.completion) for example in examples)
