"""The GRPO losses: one dataclass in, loss and metrics out. Logs nothing.

Everything is flat over completion tokens (no padding exists here), and every token carries its
weight in the *whole step's* mean. So the sum over micro-batches or ranks is the step's loss, however
the step is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SAMPLER_WEIGHT_CAP = 2.0


@dataclass(frozen=True)
class LossSettings:
    """The part of a GRPO config that the loss needs; names as there."""

    loss: str = "grpo"
    clip_low: float = 0.2
    clip_high: float = 0.28
    kl_beta: float = 0.0
    sampler_correction: str = "truncate"


@dataclass(frozen=True)
class TokenBatch:
    """Completion tokens of some completions, flat.

    Attributes:
        policy_logprobs: ``float[tokens]``, differentiable.
        old_policy_logprobs: ``float[tokens]``, of the policy that began this step's updates; same code path.
        sampler_logprobs: ``float[tokens]``, as decoding saw them; serve the sampler correction only.
        reference_logprobs: ``float[tokens]`` or None when kl_beta is 0.
        advantages: ``float[tokens]``, each token its completion's.
        weights: ``float[tokens]`` from `token_weights`.
        sequence: ``int[tokens]``, number of the completion, from 0, non-decreasing.
    """

    policy_logprobs: Tensor
    old_policy_logprobs: Tensor
    sampler_logprobs: Tensor
    reference_logprobs: Tensor | None
    advantages: Tensor
    weights: Tensor
    sequence: Tensor


@dataclass(frozen=True)
class LossOutput:
    """The loss of a batch (a share of the step's) and sums over its tokens, for means over the step."""

    loss: Tensor
    sums: dict[str, float]
    logprob_difference_max: float


def token_weights(lengths: Sequence[int], loss: str, max_new_tokens: int) -> list[float]:
    """The weight of each token of each completion in the step's mean.

    Args:
        lengths: tokens of every completion that counts in this step: zero-variance groups do,
            invalid items and masked truncated ones do not.

    Returns:
        One weight per completion, valid for each of its tokens:

        - ``grpo``, ``gspo``: 1 / (N T_i), the mean over sequences of means over tokens;
        - ``dr_grpo``: 1 / (N L) with the constant L = max_new_tokens (arXiv 2503.20783);
        - ``dapo``: 1 / sum of T, the mean over the step's tokens (arXiv 2503.14476, equation 8).
    """
    count, total = len(lengths), sum(lengths)
    if total == 0:
        return [0.0] * count
    if loss == "dapo":
        return [1 / total if length else 0.0 for length in lengths]
    if loss == "dr_grpo":
        return [1 / (count * max_new_tokens)] * count
    return [1 / (count * length) if length else 0.0 for length in lengths]


def grpo_loss(batch: TokenBatch, settings: LossSettings) -> LossOutput:
    """Clipped surrogate with KL penalty, summed over the batch's tokens with their weights in the step.

    Per token: ``-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`` with r = exp(policy - old policy), for
    ``gspo`` r is the sequence's exp(mean of differences) (arXiv 2507.18071, equation 7). The whole
    estimator is weighted by min(exp(old policy - sampler), 2), because the tokens were drawn by the sampler.

    The KL term is r * k2 with r detached: its gradient is that of KL(policy || reference), which k3's is
    not (k3 as a loss follows the other direction). The reported ``kl`` is k3, non-negative and unbiased.
    """
    difference = batch.policy_logprobs - batch.old_policy_logprobs
    token_ratio = difference.exp()
    ratio = _sequence_ratio(difference, batch.sequence) if settings.loss == "gspo" else token_ratio
    clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    per_token = -torch.minimum(ratio * batch.advantages, clipped * batch.advantages)

    with torch.no_grad():
        gap = batch.old_policy_logprobs - batch.sampler_logprobs
        low = (ratio < 1 - settings.clip_low) & (batch.advantages < 0)
        high = (ratio > 1 + settings.clip_high) & (batch.advantages > 0)
        sums = {
            "clip_ratio/low": float(low.sum()),
            "clip_ratio/high": float(high.sum()),
            "sampling/logprob_difference_mean": float(gap.abs().sum()),
            "tokens": float(len(gap)),
        }
    if batch.reference_logprobs is not None:
        log_ratio = batch.reference_logprobs - batch.policy_logprobs
        per_token = per_token + settings.kl_beta * token_ratio.detach() * 0.5 * log_ratio.square()
        sums["kl"] = float((log_ratio.detach().expm1() - log_ratio.detach()).sum())
    if settings.sampler_correction == "truncate":
        per_token = per_token * gap.exp().clamp(max=SAMPLER_WEIGHT_CAP)
    return LossOutput(
        loss=(per_token * batch.weights).sum(),
        sums=sums,
        logprob_difference_max=float(gap.abs().max()) if len(gap) else 0.0,
    )


def _sequence_ratio(difference: Tensor, sequence: Tensor) -> Tensor:
    """exp(mean over the sequence of log-ratios), at each of its tokens; every token gets its share of gradient."""
    count = int(sequence.max()) + 1 if len(sequence) else 0
    totals = torch.zeros(count, dtype=difference.dtype, device=difference.device).index_add(0, sequence, difference)
    lengths = torch.bincount(sequence, minlength=count).clamp(min=1)
    return (totals / lengths).exp()[sequence]
