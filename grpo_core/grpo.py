"""Group relative policy optimisation (GRPO, arXiv 2402.03300): the loop.

A step samples a group of completions for each of its prompts, scores them, and updates the policy
towards what earned more than the rest of its group. Rollouts are in `rollouts.py`, the loss in
`losses.py`; how a run resumes, stops and ends is in `training.py`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from grpo_core.chat import Chat
from grpo_core.checkpoints import CheckpointStore
from grpo_core.config import GRPOConfig
from grpo_core.continuation import stored_result
from grpo_core.engines.base import Prefill
from grpo_core.environments.base import Problem
from grpo_core.environments.registry import make_environment
from grpo_core.evaluation import validate
from grpo_core.logprobs import token_logprobs
from grpo_core.losses import LossSettings, TokenBatch, grpo_loss, token_weights
from grpo_core.models import enable_gradient_checkpointing, load_base_model
from grpo_core.packing import Group, packed_length
from grpo_core.policies.adapters import applied
from grpo_core.policies.base import TrainablePolicy
from grpo_core.policies.starting import input_digests, start_policy
from grpo_core.progress import Monitor, raise_if_stopping
from grpo_core.results import TrainingResult
from grpo_core.rollouts import Roller, Rollout, Rollouts, micro_batch_tokens, rollout_metrics, shown_completions
from grpo_core.sampling import TorchSampler
from grpo_core.training import StepResult, TrainingRun

REUSED_SHARE = 0.55
"""Share of groups with a signal from which the sampler's computation of all prompts is trained on.

A backward pass costs about 1.2 forward passes. With reuse it covers the prompts of all n groups (1.2 n); without,
the s groups with a signal are computed forward and backward (2.2 s): reuse pays where s > 0.55 n.
"""


def train_grpo(config: GRPOConfig, monitor: Monitor) -> TrainingResult:
    """Train, resume, or return the result of a finished run in ``config.checkpoint_dir``.

    Raises:
        ConfigError: a prompt does not fit into the context, or the initial adapter's rank differs.
        CheckpointConflict: the folder belongs to another run.
        TrainingFailed: no group ever had a signal, or a number was not finite.
    """
    config = config.resolved()
    budget = config.max_new_tokens
    assert config.checkpoint_dir is not None and budget is not None
    store = CheckpointStore(config.checkpoint_dir)
    init, init_field = config.init_checkpoint_dir, "init_checkpoint_dir"
    inputs = input_digests(store, config, init, init_field)
    if finished := stored_result(store, config, inputs):
        return finished
    base = load_base_model(config.family, config.model_dir, config.device, config.dtype)
    if config.gradient_checkpointing:
        enable_gradient_checkpointing(base)
    policy = start_policy(base, store, init, init_field, config.lora_rank, None, config.seed)
    environment = make_environment(config.environment, config.environment_options)
    run = TrainingRun(
        "rl",
        config,
        policy,
        store,
        monitor,
        items=config.prompts,
        per_step=config.prompts_per_step,
        inputs=inputs,
        micro_batch=micro_batch_tokens(config),
    )
    roller = Roller(config, policy, environment, Chat(base), TorchSampler(base), monitor)
    roller.refuse_long_prompts(config.prompts)
    trainer = GroupTrainer(config, policy, monitor)
    watched = environment.problems(config.seed, "validation", config.eval_prompts) if config.eval_every else []

    def step(number: int, items: range) -> StepResult:
        started = time.monotonic()
        rollouts = roller.roll(number, items)
        rolled = time.monotonic()
        metrics = rollout_metrics(rollouts.groups, rollouts.redrawn) | trainer.train(run, number, rollouts)
        trained = time.monotonic() - rolled - metrics["time/reference"]
        metrics |= {"time/rollout": rolled - started, "time/train": trained}
        tokens = sum(len(r.prompt) + len(c.ids) for r in rollouts.groups for c in r.completions)
        return StepResult(metrics, tokens, shown_completions(number, rollouts.groups))

    def validated() -> dict[str, float]:
        return validate(policy, environment, watched, budget, monitor)

    with run:
        run.freeze_reference(config.kl_reference)
        return run.execute(step, validated if watched else None, config.eval_every)


@dataclass
class _MicroBatch:
    """Groups of one pass with everything about their completion tokens that does not depend on the policy's weights.

    Attributes:
        prefill: the groups' prompts, computed by the sampler with gradients; used once.
    """

    rollouts: list[Rollout]
    groups: list[Group]
    sampler_logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    sequence: Tensor
    prefill: Prefill | None = None
    reference_logprobs: Tensor | None = None
    old_policy_logprobs: Tensor | None = None


@dataclass
class _Sums:
    """Sums over the trained tokens of one update pass."""

    loss: float = 0.0
    difference_max: float = 0.0
    reference_s: float = 0.0
    totals: dict[str, float] = field(default_factory=dict)


class GroupTrainer:
    """Turns one step's rollouts into optimizer updates."""

    def __init__(self, config: GRPOConfig, policy: TrainablePolicy, monitor: Monitor):
        self._config = config
        self._policy = policy
        self._monitor = monitor
        self._settings = LossSettings(
            loss=config.loss,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            kl_beta=config.kl_beta,
            sampler_correction=config.sampler_correction,
        )

    def train(self, run: TrainingRun, step: int, rollouts: Rollouts) -> dict[str, float]:
        """`updates_per_rollout` updates; metrics are means over the trained tokens of all passes.

        Raises:
            StopNow: a stop was wanted before the first update; the policy is unchanged then.
        """
        batches = self._batches(rollouts)
        losses: list[float] = []
        difference_max, reference_s, totals, update = 0.0, 0.0, dict[str, float](), dict[str, float]()
        for number in range(self._config.updates_per_rollout):
            sums = self._accumulate(batches, may_stop=number == 0)
            update = run.update(step)
            losses.append(sums.loss)
            difference_max = max(difference_max, sums.difference_max)
            reference_s += sums.reference_s
            totals = {name: totals.get(name, 0.0) + value for name, value in sums.totals.items()}
        tokens = totals.pop("tokens", 0.0)
        means = {name: value / tokens for name, value in totals.items()} if tokens else {}
        absent = dict.fromkeys(("clip_ratio/low", "clip_ratio/high", "sampling/logprob_difference_mean"), 0.0)
        return {
            "loss": sum(losses) / len(losses),
            **absent,
            **means,
            "sampling/logprob_difference_max": difference_max,
            "fast_path": float(self._policy.base.engine.shares_prompts),
            "time/reference": reference_s,
            **update,
        }

    def _accumulate(self, batches: Sequence[_MicroBatch], may_stop: bool) -> _Sums:
        """One pass: gradients of the whole step's loss into the policy's parameters."""
        sums = _Sums()
        for batch in batches:
            if may_stop:
                raise_if_stopping(self._monitor)
            problems = [rollout.problem for rollout in batch.rollouts]
            prefill, batch.prefill = batch.prefill, None
            leaves = prefill.adapters if prefill else self._policy.leaf_adapters(problems)
            if self._config.kl_beta and batch.reference_logprobs is None:
                started = time.monotonic()
                batch.reference_logprobs = self._reference_logprobs(batch, problems)
                sums.reference_s += time.monotonic() - started
            with applied(self._policy.base.model, leaves, _rows(batch)):
                logprobs = token_logprobs(self._policy.base, batch.groups, self._config.temperature, prefill)
                if batch.old_policy_logprobs is None:
                    batch.old_policy_logprobs = logprobs.detach()
                output = grpo_loss(
                    TokenBatch(
                        policy_logprobs=logprobs,
                        old_policy_logprobs=batch.old_policy_logprobs,
                        sampler_logprobs=batch.sampler_logprobs,
                        reference_logprobs=batch.reference_logprobs,
                        advantages=batch.advantages,
                        weights=batch.weights,
                        sequence=batch.sequence,
                    ),
                    self._settings,
                )
                # Within the context: gradient checkpointing computes the forward pass again, with the adapters.
                output.loss.backward()
            self._policy.backward(leaves)
            sums.loss += float(output.loss.detach())
            sums.difference_max = max(sums.difference_max, output.logprob_difference_max)
            for name, value in output.sums.items():
                sums.totals[name] = sums.totals.get(name, 0.0) + value
        return sums

    @torch.no_grad()
    def _reference_logprobs(self, batch: _MicroBatch, problems: Sequence[Problem]) -> Tensor:
        with applied(self._policy.base.model, self._policy.reference_adapters(problems), _rows(batch)):
            return token_logprobs(self._policy.base, batch.groups, self._config.temperature)

    def _batches(self, rollouts: Rollouts) -> list[_MicroBatch]:
        """Groups in passes of like length; weights are over the whole step.

        Without a KL penalty a group whose rewards are all equal has exactly no gradient: it counts in
        the denominator and is not computed.
        """
        groups = rollouts.groups
        counted = [c for r in groups for c, keep in zip(r.completions, r.counted.tolist(), strict=True) if keep]
        assert self._config.max_new_tokens is not None
        per_completion = token_weights([len(c.ids) for c in counted], self._config.loss, self._config.max_new_tokens)
        weights = {id(completion): weight for completion, weight in zip(counted, per_completion, strict=True)}
        trained = [r for r in groups if bool(r.counted.any()) and (r.signal or self._config.kl_beta > 0)]
        if rollouts.prefill and len(trained) >= REUSED_SHARE * len(groups):
            return [self._micro_batch(groups, trained, weights, rollouts.prefill)]
        parts = _partition(trained, micro_batch_tokens(self._config))
        return [self._micro_batch(part, part, weights) for part in parts]

    def _micro_batch(
        self,
        rollouts: list[Rollout],
        trained: list[Rollout],
        weights: dict[int, float],
        prefill: Prefill | None = None,
    ) -> _MicroBatch:
        """One pass over the trained rollouts; the others give their prompt only, as `prefill` has it."""
        device = self._policy.base.device
        kept = [
            [(c, float(a)) for c, a, keep in zip(r.completions, r.advantages, r.counted.tolist(), strict=True) if keep]
            if any(r is each for each in trained)
            else []
            for r in rollouts
        ]
        flat = [pair for group in kept for pair in group]

        def per_token(values: Sequence[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device)

        return _MicroBatch(
            rollouts=rollouts,
            groups=[(r.prompt, [c.ids for c, _ in group]) for r, group in zip(rollouts, kept, strict=True)],
            sampler_logprobs=per_token([logprob for c, _ in flat for logprob in c.logprobs]),
            advantages=per_token([advantage for c, advantage in flat for _ in c.ids]),
            weights=per_token([weights[id(c)] for c, _ in flat for _ in c.ids]),
            sequence=torch.tensor([n for n, (c, _) in enumerate(flat) for _ in c.ids], device=device),
            prefill=prefill,
        )


def _rows(batch: _MicroBatch) -> Tensor:
    return torch.arange(len(batch.rollouts), device=batch.sampler_logprobs.device)


def _partition(rollouts: Sequence[Rollout], limit: int) -> list[list[Rollout]]:
    """Rollouts by length into passes of at most `limit` tokens (padding counted), at least one group each."""
    lengths = {id(r): packed_length(r.prompt, [c.ids for c in r.completions]) for r in rollouts}
    parts: list[list[Rollout]] = []
    for rollout in sorted(rollouts, key=lambda r: lengths[id(r)]):
        # ascending lengths: the newest row is the longest, so it sets the padded size
        if parts and (len(parts[-1]) + 1) * lengths[id(rollout)] <= limit:
            parts[-1].append(rollout)
        else:
            parts.append([rollout])
    return parts
