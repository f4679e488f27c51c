"""Paired statistics against published numbers, oracle libraries and exhaustive enumeration."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st
from statsmodels.stats.contingency_tables import mcnemar
from statsmodels.stats.proportion import proportion_confint

from grpo_core.errors import ConfigError
from grpo_core.lift import (
    compare,
    decide,
    mcnemar_p_value,
    mean_interval,
    sign_flip_p_value,
    smallest_detectable_lift,
    tango_interval,
    tango_score,
    wilson_interval,
)
from grpo_core.results import EvaluationResult, ItemResult


def item(id: str, reward: float, sample: int = 0, **changes) -> ItemResult:
    fields = {
        "id": id,
        "index": 0,
        "sample": sample,
        "seed": 0,
        "completion": str(reward),
        "expected": "1.0",
        "reward": reward,
        "parts": {"contains": float(reward > 0)},
        "passed": reward >= 1.0,
        "tokens": 3,
        "truncated": False,
    }
    return ItemResult(**fields | changes)


def evaluation(items: list[ItemResult], **changes) -> EvaluationResult:
    """An evaluation whose summary fields are wrong on purpose: only `per_task` may count."""
    fields = {
        "family": "smollm2-135m",
        "environment": "niah",
        "policy": "base",
        "checkpoint_dir": None,
        "num_tasks": 999,
        "mean_reward": -1.0,
        "std_reward": -1.0,
        "min_reward": -1.0,
        "max_reward": -1.0,
        "pass_rate": -1.0,
        "pass_rate_ci95": (-1.0, -1.0),
        "pass_threshold": 1.0,
        "parts": {},
        "truncated": 0,
        "failed": 0,
        "settings": {"temperature": 0.0, "num_tasks": 200},
        "settings_hash": "same",
        "duration_s": 1.0,
        "per_task": items,
    }
    return EvaluationResult(**fields | changes)


def graded(*rewards: float) -> EvaluationResult:
    return evaluation([item(f"p{index:03d}", reward) for index, reward in enumerate(rewards)])


def pairs(fixed: int, broken: int, both: int = 0, neither: int = 0) -> tuple[EvaluationResult, EvaluationResult]:
    baseline = [0.0] * fixed + [1.0] * broken + [1.0] * both + [0.0] * neither
    policy = [1.0] * fixed + [0.0] * broken + [1.0] * both + [0.0] * neither
    return graded(*baseline), graded(*policy)


# P-values


@pytest.mark.parametrize(
    ("fixed", "broken", "expected"),
    [
        (0, 0, 1.0),
        (5, 0, 2 / 2**5),  # 0.0625
        (6, 0, 2 / 2**6),  # 0.03125
        (8, 2, 2 * (1 + 10 + 45) / 2**10),  # 0.1094
        (20, 2, 2 * (1 + 22 + 231) / 2**22),  # 1.21e-4
    ],
)
def test_exact_mcnemar(fixed, broken, expected):
    assert mcnemar_p_value(fixed, broken) == pytest.approx(expected, rel=1e-12)
    assert mcnemar_p_value(broken, fixed) == mcnemar_p_value(fixed, broken)


@pytest.mark.parametrize(("fixed", "broken"), [(7, 1), (3, 3), (40, 21)])
def test_mcnemar_agrees_with_statsmodels(fixed, broken):
    assert mcnemar_p_value(fixed, broken) == pytest.approx(mcnemar([[5, fixed], [broken, 5]], exact=True).pvalue)


def test_sign_flip_test_counts_every_sign():
    differences = np.array([0.5, -0.1, 0.3, 0.25, 0.0, 0.7, -0.2])
    observed = abs(differences.sum())
    flips = [abs(np.dot(signs, differences)) for signs in itertools.product((-1, 1), repeat=7)]
    expected = np.mean([flip >= observed - 1e-12 for flip in flips])
    assert sign_flip_p_value(differences) == pytest.approx(expected, rel=1e-12)


def test_sign_flip_test_on_pass_fail_is_mcnemar():
    assert sign_flip_p_value(np.array([1.0] * 8 + [-1.0] * 2 + [0.0] * 50)) == pytest.approx(mcnemar_p_value(8, 2))


@pytest.mark.parametrize("differences", [[0.0, 0.0], [0.4], [0.4, 0.0, 0.0]])
def test_one_difference_or_none_proves_nothing(differences):
    assert sign_flip_p_value(np.array(differences)) == 1.0


def test_sampled_sign_flips_do_not_depend_on_order():
    differences = np.random.default_rng(1).normal(0.1, 1.0, size=60)
    assert sign_flip_p_value(differences) == sign_flip_p_value(differences[::-1])
    # 60 normal differences: the permutation test and the t test are close; Monte Carlo error is below 0.01.
    assert sign_flip_p_value(differences) == pytest.approx(scipy.stats.ttest_1samp(differences, 0).pvalue, abs=0.02)


# Intervals


@pytest.mark.parametrize(("successes", "n"), [(0, 10), (10, 10), (3, 10), (0.5, 4), (199, 200)])
def test_wilson_agrees_with_statsmodels(successes, n):
    assert wilson_interval(successes, n) == pytest.approx(proportion_confint(successes, n, method="wilson"), abs=1e-12)


def test_wilson_without_data_knows_nothing():
    assert wilson_interval(0, 0) == (0.0, 1.0)


def test_tango_score_reproduces_the_papers_example():
    # Tango 1998, section 6.1 (soft contact lenses): n = 44, b = 0, c = 1, margin 0.1: Z = 1.709; the lower
    # 90 % limit is printed as -0.096, where Z is z_{0.05} = 1.645 up to the rounding of the printed limit.
    assert tango_score(0, 1, 44, -0.1) == pytest.approx(1.709, abs=5e-4)
    assert tango_score(0, 1, 44, -0.0965) > 1.645 > tango_score(0, 1, 44, -0.0955)


@pytest.mark.parametrize(
    ("fixed", "broken", "n", "expected"),
    [
        # Fagerland, Lydersen & Laake 2014 (Stat. Med. 33:2850), airway hyper-responsiveness, 1 | 7 of 21.
        (1, 7, 21, (-0.517, -0.026)),
        # R: PropCIs::scoreci.mp(20, 60, 1000), printed to four decimals.
        (60, 20, 1000, (0.0231, 0.0584)),
    ],
)
def test_tango_interval_reproduces_published_intervals(fixed, broken, n, expected):
    decimals = 3 if n == 21 else 4
    assert tuple(round(limit, decimals) for limit in tango_interval(fixed, broken, n)) == expected


def test_tango_interval_where_nothing_changed_does_not_collapse():
    # With b = c = 0 the score is n·d / sqrt(n·d·(1-d)) for d > 0, which reaches z at d = z²/(n + z²).
    half = 1.959964**2 / (200 + 1.959964**2)
    assert tango_interval(0, 0, 200) == pytest.approx((-half, half), abs=1e-8)


@given(st.integers(1, 400).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(0, n))))
def test_tango_interval_is_where_the_score_is_not_rejected(counts):
    n, fixed, broken = counts[0], counts[1], min(counts[2], counts[0] - counts[1])
    low, high = tango_interval(fixed, broken, n)
    estimate = (fixed - broken) / n
    assert -1.0 <= low <= estimate <= high <= 1.0
    assert tango_interval(broken, fixed, n) == pytest.approx((-high, -low), abs=1e-12)
    if low > -1.0 and low < estimate:
        assert tango_score(fixed, broken, n, low) == pytest.approx(1.959964, abs=1e-4)
    if high < 1.0 and high > estimate:
        assert tango_score(fixed, broken, n, high) == pytest.approx(-1.959964, abs=1e-4)


@pytest.mark.parametrize(("fixed_share", "broken_share"), [(0.05, 0.05), (0.2, 0.05), (0.5, 0.1), (0.9, 0.05)])
def test_tango_interval_covers_what_it_says(fixed_share, broken_share):
    # Exact coverage: all tables of 30 problems, weighted by their trinomial probability.
    n, covered = 30, 0.0
    table = scipy.stats.multinomial(n, [fixed_share, broken_share, 1 - fixed_share - broken_share])
    for fixed in range(n + 1):
        for broken in range(n + 1 - fixed):
            low, high = tango_interval(fixed, broken, n)
            if low <= fixed_share - broken_share <= high:
                covered += table.pmf([fixed, broken, n - fixed - broken])
    assert 0.93 < covered < 0.995


def test_interval_of_graded_differences_is_scipys_t_interval():
    differences = np.array([0.5, -0.1, 0.3, 0.25, 0.0, 0.7])
    assert mean_interval(differences) == pytest.approx(
        tuple(scipy.stats.ttest_1samp(differences, 0).confidence_interval())
    )


@pytest.mark.parametrize("n", [1, 4])
def test_interval_of_equal_graded_differences_keeps_a_width(n):
    half = 1.959964**2 / (n + 1.959964**2)
    assert mean_interval(np.full(n, 0.25)) == pytest.approx((0.25 - half, 0.25 + half), abs=1e-6)


# Power


@pytest.mark.parametrize(
    ("variance", "lift", "problems"),
    [
        # n = (1.95996 + 0.84162)² · variance / lift², variance 0.10 + 2·0.12/K: the counts for K = 1, 4, 8.
        (0.34, 0.05, 1068),
        (0.16, 0.05, 503),
        (0.13, 0.05, 409),
        (0.34, 0.10, 267),
        (0.16, 0.10, 126),
        (0.34, 0.20, 67),
    ],
)
def test_smallest_detectable_lift_inverts_the_sample_size_formula(variance, lift, problems):
    discordance = variance + lift**2
    assert smallest_detectable_lift(problems, discordance) <= lift < smallest_detectable_lift(problems - 1, discordance)


def test_smallest_detectable_lift_before_any_data():
    # z = 2.801585: 2.801585 · sqrt(0.34 / (200 + 7.848879)) = 0.11331.
    assert smallest_detectable_lift(200) == pytest.approx(0.11331, abs=1e-5)


def test_smallest_detectable_lift_where_nothing_changed():
    # The discordance is then the lift itself: lift = z² / (n + z²) = 7.848879 / 207.848879.
    assert smallest_detectable_lift(200, 0.0) == pytest.approx(0.0377624, abs=1e-7)
    assert smallest_detectable_lift(200, 0.0377) == pytest.approx(0.0377624, abs=1e-7)


@pytest.mark.parametrize(("n", "discordance"), [(60, 0.3), (100, 0.5), (100, 0.0), (200, 0.1)])
def test_smallest_detectable_lift_has_about_eighty_percent_power(n, discordance):
    # Exact power of the verdict itself, over all tables; the exact test is a little conservative.
    lift = smallest_detectable_lift(n, discordance)
    changed = max(discordance, lift)
    table = scipy.stats.multinomial(n, [(changed + lift) / 2, (changed - lift) / 2, 1 - changed])
    power = sum(
        table.pmf([fixed, broken, n - fixed - broken])
        for fixed in range(n + 1)
        for broken in range(min(fixed, n - fixed) + 1)
        if mcnemar_p_value(fixed, broken) < 0.05
    )
    assert 0.68 < power < 0.82


# Verdicts


@pytest.mark.parametrize(
    ("p_value", "ci95", "detectable", "expected"),
    [
        (0.01, (0.02, 0.10), 0.08, "improved"),
        (0.01, (-0.10, -0.02), 0.04, "regressed"),
        (0.0499, (1e-9, 0.10), 0.08, "improved"),
        (0.05, (0.02, 0.10), 0.08, "underpowered"),  # p must be below 0.05
        (0.05, (0.02, 0.10), 0.05, "no_evidence"),  # detectable must be above min_effect
        (0.01, (0.0, 0.10), 0.04, "no_evidence"),  # the interval must exclude 0
        (0.01, (-0.10, 0.0), 0.06, "underpowered"),
        (0.40, (-0.02, 0.03), 0.0501, "underpowered"),
        (0.40, (-0.02, 0.03), 0.04, "no_evidence"),
    ],
)
def test_decision_and_its_borders(p_value, ci95, detectable, expected):
    assert decide(p_value, ci95, detectable, min_effect=0.05) == expected


@pytest.mark.parametrize(
    ("fixed", "broken", "both", "neither", "expected"),
    [
        (6, 0, 5, 9, "improved"),  # p = 0.03125
        (0, 6, 5, 9, "regressed"),
        (5, 0, 5, 9, "underpowered"),  # p = 0.0625; 19 problems: at least 7.85 / 26.85 = 0.29
        (3, 3, 250, 250, "no_evidence"),  # 506 problems, 6 changed: 7.85 / 513.85 = 0.015
        (0, 0, 0, 200, "no_evidence"),  # 0.038
        (0, 0, 0, 100, "underpowered"),  # 0.073
    ],
)
def test_verdicts_of_pass_fail_pairs(fixed, broken, both, neither, expected):
    assert compare(*pairs(fixed, broken, both, neither)).verdict == expected


def test_min_effect_moves_the_border():
    # 200 problems without a change could have shown 0.0378.
    baseline, policy = pairs(0, 0, both=200)
    assert compare(baseline, policy, min_effect=0.03).verdict == "underpowered"
    assert compare(baseline, policy, min_effect=0.04).verdict == "no_evidence"


# The comparison as a whole


def test_pass_fail_comparison_in_numbers():
    lift = compare(*pairs(fixed=8, broken=2, both=4, neither=6))
    assert lift.num_tasks == 20
    assert lift.baseline.pass_rate == pytest.approx(6 / 20)
    assert lift.policy.pass_rate == pytest.approx(12 / 20)
    assert lift.policy.pass_rate_ci95 == pytest.approx(proportion_confint(12, 20, method="wilson"))
    assert lift.lift.pass_rate == pytest.approx(6 / 20)
    assert lift.lift.ci95 == tango_interval(8, 2, 20)
    assert lift.lift.p_value == pytest.approx(0.109375)
    assert lift.lift.test == "exact McNemar"
    assert lift.fixed == [f"p{index:03d}" for index in range(8)]
    assert lift.broken == ["p008", "p009"]
    # 10 of 20 changed: 2.801585 · sqrt(0.5 / 27.848879).
    assert lift.smallest_detectable_lift == pytest.approx(0.375392, abs=1e-5)
    assert lift.lift.parts["contains"].ci95 == tango_interval(8, 2, 20)
    assert lift.lift.parts["contains"].p_value == pytest.approx(0.109375)
    assert (lift.baseline.parts, lift.policy.parts) == ({"contains": 0.3}, {"contains": 0.6})


def test_graded_rewards_use_the_permutation_test():
    lift = compare(graded(0.1, 0.2, 0.3, 0.4), graded(0.3, 0.5, 0.9, 0.5))
    # Mean of +0.2, +0.3, +0.6, +0.1; all positive: 2 of 16 sign patterns are as far out.
    assert lift.lift.mean_reward == pytest.approx(0.3)
    assert lift.lift.mean_reward_p_value == pytest.approx(2 / 16)
    assert lift.lift.test == "exact McNemar"  # nothing passed on either side: still pass/fail


def test_samples_of_one_problem_are_averaged_first():
    def sampled(*shares: float) -> EvaluationResult:
        return evaluation(
            [
                item(f"p{index}", float(sample < 4 * share), sample)
                for index, share in enumerate(shares)
                for sample in range(4)
            ]
        )

    lift = compare(sampled(0.0, 0.25, 0.5, 0.5, 1.0), sampled(0.25, 0.75, 1.0, 0.5, 0.75))
    # Differences +.25, +.5, +.5, 0, -.25 over 5 problems, not 20 completions.
    assert lift.num_tasks == 5
    assert lift.lift.pass_rate == pytest.approx(0.2)
    assert lift.lift.test == "paired permutation"
    # Of 2^4 sign patterns of (1, 2, 2, -1) those with |sum| >= 4: sums ±6 (2), ±4 (4).
    assert lift.lift.p_value == pytest.approx(6 / 16)
    assert lift.lift.ci95 == pytest.approx(
        tuple(scipy.stats.ttest_1samp([0.25, 0.5, 0.5, 0.0, -0.25], 0).confidence_interval())
    )
    assert lift.policy.pass_rate_ci95 == pytest.approx(proportion_confint(3.25, 5, method="wilson"))
    assert (lift.fixed, lift.broken) == (["p0", "p1", "p2"], ["p4"])


def test_order_of_items_does_not_matter():
    generator = random.Random(0)
    baseline = graded(*[generator.random() for _ in range(40)])
    policy = graded(*[generator.random() for _ in range(40)])
    shuffled = policy.model_copy(update={"per_task": generator.sample(policy.per_task, 40)})
    assert compare(baseline, shuffled) == compare(baseline, policy)


def test_failed_items_count_as_zero():
    # 10 problems, 5 right and 5 failed: 0.5, never 5 of 5.
    failed = {"error": "TimeoutError: too slow", "parts": {}, "completion": ""}
    policy = evaluation([item(f"p{i:03d}", 1.0) if i < 5 else item(f"p{i:03d}", 0.0, **failed) for i in range(10)])
    lift = compare(graded(*[1.0] * 10), policy)
    assert lift.policy.pass_rate == 0.5
    assert lift.policy.mean_reward == 0.5
    assert lift.policy.parts == {"contains": 0.5}
    assert len(lift.broken) == 5


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([0.0, 0.5, 1.0])), min_size=1, max_size=12))
def test_every_number_is_finite(rewards):
    lift = compare(graded(*[before for before, _ in rewards]), graded(*[after for _, after in rewards]))

    def numbers(value):
        if isinstance(value, dict | list | tuple):
            for inner in value.values() if isinstance(value, dict) else value:
                yield from numbers(inner)
        elif isinstance(value, float):
            yield value

    assert all(math.isfinite(number) for number in numbers(lift.model_dump()))
    assert -1.0 <= lift.lift.ci95[0] <= lift.lift.pass_rate <= lift.lift.ci95[1] <= 1.0
    assert type(lift.lift.p_value) is float


# Refusals


def refused(baseline: EvaluationResult, policy: EvaluationResult) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        compare(baseline, policy)
    return caught.value


def test_different_settings_are_refused_with_both_values():
    other = graded(1.0).model_copy(
        update={"settings": {"temperature": 0.7, "num_tasks": 200, "dtype": "float32"}, "settings_hash": "other"}
    )
    error = refused(graded(1.0), other)
    assert error.field == "policy"
    assert error.message == (
        "its evaluation has other settings than the baseline's: dtype (None in the baseline, 'float32' in the policy), "
        "temperature (0.0 in the baseline, 0.7 in the policy)"
    )


def test_different_hashes_of_equal_settings_are_refused():
    error = refused(graded(1.0), graded(1.0).model_copy(update={"settings_hash": "other"}))
    assert "settings_hash ('same' in the baseline, 'other' in the policy)" in error.message


def test_different_problems_are_refused_with_counts_and_examples():
    baseline = evaluation([item(id, 1.0) for id in ("a", "b", "c", "d", "e", "shared")])
    policy = evaluation([item(id, 1.0) for id in ("shared", "z")])
    error = refused(baseline, policy)
    assert error.field == "policy"
    assert "5 only in the baseline (for example 'a' sample 0, 'b' sample 0, 'c' sample 0)" in error.message
    assert "1 only in the policy (for example 'z' sample 0)" in error.message


def test_a_missing_sample_is_refused():
    complete = evaluation([item("a", 1.0, sample) for sample in range(2)])
    assert (
        "1 only in the baseline (for example 'a' sample 1), 0 only"
        in refused(complete, evaluation([item("a", 1.0)])).message
    )


def test_a_repeated_completion_is_refused_on_its_side():
    repeated = evaluation([item("a", 1.0), item("a", 0.0)])
    assert refused(repeated, evaluation([item("a", 1.0)])).field == "baseline"
    error = refused(evaluation([item("a", 1.0)]), repeated)
    assert (error.field, error.message) == (
        "policy",
        "its evaluation holds 1 completions twice (for example 'a' sample 0)",
    )


def test_an_evaluation_without_items_is_refused():
    assert refused(evaluation([]), evaluation([])).message == "its evaluation has no per_task items"


@pytest.mark.parametrize("odd", [{"reward": math.nan}, {"parts": {"contains": math.inf}}])
def test_numbers_that_are_not_finite_are_refused(odd):
    error = refused(evaluation([item("a", 1.0)]), evaluation([item("a", 1.0).model_copy(update=odd)]))
    assert error.message == "its evaluation holds 1 rewards or parts that are not finite (for example 'a' sample 0)"
