"""One step's rollouts: prompts, groups of completions, their scores and advantages.

Prompts come from the ``train`` split (stream ``rl``) by position; a group without signal may be
drawn again from another stream, without moving the position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo_core.advantages import group_advantages, has_signal
from grpo_core.chat import Chat
from grpo_core.config import GRPOConfig
from grpo_core.engines.base import Prefill
from grpo_core.environments.base import Environment, Problem, Score
from grpo_core.errors import TrainingFailed
from grpo_core.policies.base import TrainablePolicy
from grpo_core.progress import Monitor, raise_if_stopping
from grpo_core.sampling import Completion, Sampler, SamplingSettings, addressed_uniforms

MAX_INVALID_SHARE = 0.5
"""A step in which more than this share of the completions could not be scored fails the run."""

CHECKED_PROMPTS = 1024
"""Prompts rendered before training starts (2 ms each)."""

AUTOMATIC_MICRO_BATCH_TOKENS = 4096

_SHOWN_GROUPS = 2


@dataclass(frozen=True)
class Rollout:
    """A problem, its group of completions and what they earned.

    Attributes:
        rewards: ``float[group]``, 0 where invalid. valid: ``bool[group]``, scored without error.
        counted: ``bool[group]``, completions that count in loss and denominator.
        advantages: ``float[group]``.
        errors: why the invalid ones could not be scored.
    """

    problem: Problem
    prompt: list[int]
    completions: list[Completion]
    texts: list[str]
    rewards: Tensor
    parts: list[Mapping[str, float]]
    valid: Tensor
    counted: Tensor
    advantages: Tensor
    errors: list[str]

    @property
    def signal(self) -> bool:
        """Whether the group's rewards differ."""
        return has_signal(self.rewards, self.valid)


@dataclass(frozen=True)
class Rollouts:
    """A step's rollouts.

    Attributes:
        redrawn: how many groups had to be drawn again.
        prefill: all prompts in order, computed with gradients; None where they must be computed again.
    """

    groups: list[Rollout]
    redrawn: int
    prefill: Prefill | None


class Roller:
    """Makes the rollouts of a run's steps."""

    def __init__(
        self,
        config: GRPOConfig,
        policy: TrainablePolicy,
        environment: Environment,
        chat: Chat,
        sampler: Sampler,
        monitor: Monitor,
    ):
        assert config.max_new_tokens is not None
        self._config = config
        self._policy = policy
        self._environment = environment
        self._chat = chat
        self._sampler = sampler
        self._monitor = monitor
        self._settings = SamplingSettings(config.max_new_tokens, config.temperature, chat.stop_ids)

    def roll(self, step: int, items: range) -> Rollouts:
        """Rollouts of the prompts at these positions.

        Raises:
            StopNow: a stop was wanted.
            TrainingFailed: more than `MAX_INVALID_SHARE` of the completions could not be scored.
        """
        first, prefill = self._sample(step, items, attempt=0)
        rollouts = dict(zip(items, first, strict=True))
        redrawn = 0
        for attempt in range(1, self._config.resample_zero_variance + 1):
            flat = [position for position, rollout in rollouts.items() if not rollout.signal]
            if not flat:
                break
            redrawn += len(flat)
            rollouts |= dict(zip(flat, self._sample(step, flat, attempt)[0], strict=True))
        done = list(rollouts.values())
        self._refuse_mostly_invalid(step, done)
        return Rollouts(done, redrawn, None if redrawn else prefill)

    def refuse_long_prompts(self, count: int) -> None:
        """Render the run's first prompts, so that one that does not fit is found now and not hours later.

        Raises:
            ConfigError: prompt and completion budget do not fit into the context.
        """
        for position in range(min(count, CHECKED_PROMPTS)):
            self._prompt(self._environment.problem(self._config.seed, "train", position, "rl"))

    def _prompt(self, problem: Problem) -> list[int]:
        return self._chat.prompt_ids(self._policy.render(problem), self._settings.max_new_tokens)

    def _sample(self, step: int, positions: Sequence[int], attempt: int) -> tuple[list[Rollout], Prefill | None]:
        """One group per position; and their prompts, computed with gradients if they may be trained on as they are."""
        config = self._config
        stream = "rl" if attempt == 0 else f"rl/resample-{attempt}"
        problems = [self._environment.problem(config.seed, "train", position, stream) for position in positions]
        prompts = [self._prompt(problem) for problem in problems]
        tokens = self._settings.max_new_tokens
        uniforms = [addressed_uniforms(config.seed, step, p, attempt, config.group_size, tokens) for p in positions]
        most = sum(len(prompt) + config.group_size * (tokens - 1) for prompt in prompts)
        reusable = config.updates_per_rollout == 1 and most <= micro_batch_tokens(config)
        sampled = self._sampler.sample(
            prompts,
            self._policy.leaf_adapters(problems) if reusable else self._policy.adapters(problems),
            self._settings,
            np.stack(uniforms),
            between_tokens=lambda: raise_if_stopping(self._monitor),
        )
        rollouts = [self._score(*each) for each in zip(problems, prompts, sampled.groups, strict=True)]
        return rollouts, sampled.prefill if reusable else None

    def _score(self, problem: Problem, prompt: list[int], completions: list[Completion]) -> Rollout:
        texts = [self._chat.text(completion.ids) for completion in completions]
        scores = [self._environment.checked_score(problem, text) for text in texts]
        valid = torch.tensor([isinstance(score, Score) for score in scores])
        rewards = torch.tensor([score.reward if isinstance(score, Score) else 0.0 for score in scores])
        masked = torch.tensor([self._config.truncated == "mask" and c.truncated for c in completions])
        return Rollout(
            problem=problem,
            prompt=prompt,
            completions=completions,
            texts=texts,
            rewards=rewards,
            parts=[score.parts if isinstance(score, Score) else {} for score in scores],
            valid=valid,
            counted=valid & ~masked,
            advantages=group_advantages(rewards, valid, self._config.advantage),
            errors=[score for score in scores if isinstance(score, str)],
        )

    def _refuse_mostly_invalid(self, step: int, rollouts: Sequence[Rollout]) -> None:
        errors = [error for rollout in rollouts for error in rollout.errors]
        count = sum(len(rollout.completions) for rollout in rollouts)
        if len(errors) > MAX_INVALID_SHARE * count:
            raise TrainingFailed(
                f"{len(errors)} of {count} completions of step {step} could not be scored; the first: {errors[0]}",
                hint="mend the environment's reward",
                code="REWARD_FAILED",
            )


def micro_batch_tokens(config: GRPOConfig) -> int:
    """Tokens of one forward and backward pass."""
    return config.micro_batch_tokens or AUTOMATIC_MICRO_BATCH_TOKENS


def rollout_metrics(rollouts: Sequence[Rollout], redrawn: int) -> dict[str, float]:
    """What the step's rollouts were like. Means over rewards leave out invalid items, which are counted."""
    completions = [completion for rollout in rollouts for completion in rollout.completions]
    rewards = torch.cat([rollout.rewards[rollout.valid] for rollout in rollouts]).double()
    stds = [float(r.rewards[r.valid].double().std()) for r in rollouts if int(r.valid.sum()) > 1]
    lengths = [len(completion.ids) for completion in completions]
    entropies = [entropy for completion in completions for entropy in completion.entropies]
    names = sorted({name for rollout in rollouts for parts in rollout.parts for name in parts})
    scored = [parts for r in rollouts for parts, valid in zip(r.parts, r.valid.tolist(), strict=True) if valid]
    return {
        "reward": float(rewards.mean()) if len(rewards) else 0.0,
        "reward_std": float(np.mean(stds)) if stds else 0.0,
        **{f"rewards/{name}": float(np.mean([parts.get(name, 0.0) for parts in scored])) for name in names},
        "frac_reward_zero_std": sum(not rollout.signal for rollout in rollouts) / len(rollouts),
        "resampled": float(redrawn),
        "invalid": float(sum(len(rollout.errors) for rollout in rollouts)),
        "entropy": float(np.mean(entropies)),
        "completions/mean_length": float(np.mean(lengths)),
        "completions/clipped_ratio": sum(completion.truncated for completion in completions) / len(completions),
    }


def shown_completions(step: int, rollouts: Sequence[Rollout]) -> list[dict[str, Any]]:
    """A sample of the step's completions as flat records: the first groups, whole."""
    return [
        {
            "step": step,
            "problem": rollout.problem.id,
            "completion": text,
            "expected": rollout.problem.answer,
            "reward": float(reward),
            "advantage": float(advantage),
            "valid": bool(valid),
            "truncated": completion.truncated,
        }
        for rollout in rollouts[:_SHOWN_GROUPS]
        for text, reward, advantage, valid, completion in zip(
            rollout.texts, rollout.rewards, rollout.advantages, rollout.valid, rollout.completions, strict=True
        )
    ]
