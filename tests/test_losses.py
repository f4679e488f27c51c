"""The losses against closed forms and hand-derived numbers."""

import math

import pytest
import torch

from grpo_core.losses import LossSettings, TokenBatch, grpo_loss, token_weights


def batch(lengths: list[int], advantages: list[float], loss: str = "grpo", budget: int = 10, **given) -> TokenBatch:
    """Completions of these lengths, every log-probability 0 unless given."""
    tokens = sum(lengths)
    per_sequence = token_weights(lengths, loss, budget)
    flat = lambda values: torch.tensor([v for v, n in zip(values, lengths, strict=True) for _ in range(n)])  # noqa: E731
    zeros = torch.zeros(tokens)
    return TokenBatch(
        policy_logprobs=given.get("policy", zeros.clone()),
        old_policy_logprobs=given.get("old", zeros),
        sampler_logprobs=given.get("sampler", given.get("old", zeros)),
        reference_logprobs=given.get("reference"),
        advantages=flat(advantages),
        weights=flat(per_sequence),
        sequence=flat(list(range(len(lengths)))).long(),
    )


# Lengths 2 and 8, per-token loss 1 and 0 (advantages -1 and 0 at ratio 1):
#   mean of per-sequence means (1 + 0) / 2; token mean 2 / 10; constant length 2 / (2 * 10)
@pytest.mark.parametrize(("loss", "expected"), [("grpo", 0.5), ("dapo", 0.2), ("dr_grpo", 0.1), ("gspo", 0.5)])
def test_reduction(loss: str, expected: float) -> None:
    output = grpo_loss(batch([2, 8], [-1.0, 0.0], loss), LossSettings(loss=loss))
    assert float(output.loss) == pytest.approx(expected)


@pytest.mark.parametrize("loss", ["grpo", "dapo", "dr_grpo", "gspo"])
def test_micro_batches_add_up_to_the_whole_step(loss: str) -> None:
    lengths, advantages = [2, 8, 3], [-1.0, 0.5, 2.0]
    generator = torch.Generator().manual_seed(0)
    policy = torch.randn(13, generator=generator, dtype=torch.float64) * 0.1
    whole = batch(lengths, advantages, loss, policy=policy.clone().requires_grad_())
    settings = LossSettings(loss=loss)
    grpo_loss(whole, settings).loss.backward()
    leaf, start = policy.clone().requires_grad_(), 0
    total = 0.0
    for number, length in enumerate(lengths):
        stop = start + length
        part = TokenBatch(
            leaf[start:stop],
            *(t[start:stop] for t in (whole.old_policy_logprobs, whole.sampler_logprobs)),
            None,
            whole.advantages[start:stop],
            whole.weights[start:stop],
            whole.sequence[start:stop] - number,
        )
        output = grpo_loss(part, settings)
        output.loss.backward()
        total, start = total + float(output.loss.detach()), stop
    assert total == pytest.approx(float(grpo_loss(whole, settings).loss.detach()), abs=1e-12)
    assert whole.policy_logprobs.grad is not None and leaf.grad is not None
    assert torch.allclose(leaf.grad, whole.policy_logprobs.grad, atol=1e-12, rtol=0)
    assert float(leaf.grad.abs().max()) > 1e-3


def test_masked_truncated_completion_leaves_the_denominator() -> None:
    # Of lengths 2 and 8 only the first counts: token mean 2 / 2, not 2 / 10.
    assert token_weights([2], "dapo", 10) == [0.5]
    assert float(grpo_loss(batch([2], [-1.0], "dapo"), LossSettings(loss="dapo")).loss) == pytest.approx(1.0)


@pytest.mark.parametrize("loss", ["grpo", "dapo", "dr_grpo", "gspo"])
def test_no_counted_token_is_exactly_no_loss(loss: str) -> None:
    empty = batch([], [], loss)
    output = grpo_loss(empty, LossSettings(loss=loss))
    assert float(output.loss) == 0 and output.sums["tokens"] == 0


def test_clipping_is_pessimistic_for_bad_actions() -> None:
    # A = -1, ratio 10: -min(-10, -1.28) = 10; and for A = +1: -min(10, 1.28) = -1.28
    ratio_ten = torch.tensor([math.log(10.0)])
    assert float(grpo_loss(batch([1], [-1.0], policy=ratio_ten), LossSettings()).loss) == pytest.approx(10.0)
    assert float(grpo_loss(batch([1], [1.0], policy=ratio_ten), LossSettings()).loss) == pytest.approx(-1.28)


@pytest.mark.parametrize(
    ("advantage", "ratio", "low", "high"), [(1.0, 1.5, 0, 1), (-1.0, 0.5, 1, 0), (1.0, 0.5, 0, 0), (-1.0, 1.5, 0, 0)]
)
def test_clip_counts_only_where_clipping_binds(advantage: float, ratio: float, low: int, high: int) -> None:
    sums = grpo_loss(batch([1], [advantage], policy=torch.tensor([math.log(ratio)])), LossSettings()).sums
    assert (sums["clip_ratio/low"], sums["clip_ratio/high"]) == (low, high)


def test_gspo_ratio_is_the_mean_of_log_ratios_and_reaches_every_token() -> None:
    policy = torch.tensor([0.1, 0.2, 0.3], requires_grad=True)
    output = grpo_loss(batch([3], [1.0], "gspo", policy=policy), LossSettings(loss="gspo", clip_high=10))
    assert float(output.loss.detach()) == pytest.approx(-math.exp(0.2))  # 1.2214, not exp(0.6) = 1.8221
    output.loss.backward()
    # d/dlp of -exp(mean lp) A is -s A / T at every token
    assert policy.grad is not None
    assert policy.grad.tolist() == pytest.approx([-math.exp(0.2) / 3] * 3)


PI, REF = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64)


def test_kl_as_a_loss_has_the_gradient_of_kl_policy_reference() -> None:
    # dKL/dlogit_i = pi_i (log(pi_i / ref_i) - KL), KL = 0.025267; k3 as a loss would give [.1, -.1, 0].
    logits = PI.log().clone().requires_grad_()
    logprobs = torch.log_softmax(logits, -1)
    everything = TokenBatch(  # the exact expectation: each token once, weighted by its probability
        policy_logprobs=logprobs,
        old_policy_logprobs=logprobs.detach(),
        sampler_logprobs=logprobs.detach(),
        reference_logprobs=REF.log(),
        advantages=torch.zeros(3, dtype=torch.float64),
        weights=PI,
        sequence=torch.arange(3),
    )
    output = grpo_loss(everything, LossSettings(kl_beta=1.0))
    output.loss.backward()
    assert logits.grad is not None
    assert logits.grad.tolist() == pytest.approx([0.098938, -0.093885, -0.005053], abs=1e-6)


def test_kl_metric_is_k3_and_zero_at_the_reference() -> None:
    policy = torch.tensor([-1.0, -2.0])
    same = grpo_loss(batch([2], [0.0], policy=policy, old=policy, reference=policy.clone()), LossSettings(kl_beta=0.1))
    assert same.sums["kl"] == 0.0
    # reference - policy = 0.5 at one token: exp(0.5) - 1 - 0.5
    moved = grpo_loss(
        batch([2], [0.0], policy=policy, old=policy, reference=policy + torch.tensor([0.5, 0.0])), LossSettings()
    )
    assert moved.sums["kl"] == pytest.approx(math.exp(0.5) - 1.5, abs=1e-6)


def test_kl_has_a_gradient_without_any_advantage() -> None:
    policy = torch.tensor([-1.0], requires_grad=True)
    old = policy.detach()
    given = batch([1], [0.0], policy=policy, old=old, reference=torch.tensor([-1.5]))
    grpo_loss(given, LossSettings(kl_beta=2.0)).loss.backward()
    # beta * (policy - reference) = 2 * 0.5
    assert policy.grad is not None and float(policy.grad) == pytest.approx(1.0)


def test_sampler_correction_is_per_token_and_truncated_at_two() -> None:
    # exp(old - sampler) = 0.5, 1, e -> 0.5, 1, 2; ratio 1 and A = -1, so the loss is their mean weight
    old = torch.zeros(3)
    sampler = torch.tensor([math.log(2.0), 0.0, -1.0])
    given = batch([3], [-1.0], policy=old.clone(), old=old, sampler=sampler)
    assert float(grpo_loss(given, LossSettings()).loss) == pytest.approx((0.5 + 1 + 2) / 3)
    assert float(grpo_loss(given, LossSettings(sampler_correction="none")).loss) == pytest.approx(1.0)


def test_tiny_mismatch_does_not_reject_long_answers() -> None:
    # 0.002 a token over 2,000 tokens: a weight of exp(4) = 54.6 per sequence, but exp(0.002) per token
    old = torch.zeros(2000)
    given = batch([2000], [-1.0], policy=old.clone(), old=old, sampler=old - 0.002)
    assert float(grpo_loss(given, LossSettings()).loss) == pytest.approx(math.exp(0.002), abs=1e-5)


def test_logprob_difference_is_measured_against_the_sampler() -> None:
    old = torch.tensor([0.0, 0.0])
    output = grpo_loss(
        batch([2], [1.0], policy=old.clone(), old=old, sampler=torch.tensor([0.1, -0.3])), LossSettings()
    )
    assert output.sums["sampling/logprob_difference_mean"] / 2 == pytest.approx(0.2)
    assert output.logprob_difference_max == pytest.approx(0.3)


def test_weights_ignore_empty_completions() -> None:
    assert token_weights([0, 4], "grpo", 10) == [0.0, 0.125]
