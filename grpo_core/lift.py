"""Paired statistics of two evaluations: is the policy better than the baseline, and how sure is that?

Both sides answered the same problems, so everything is computed on differences of the same problem.
A problem is the unit: several samples of it are averaged first and never counted as several problems.
Problems are taken as independent of each other; an environment whose problems share documents would
need clustered errors, which are not here. Rendering is left to `report/`.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import NormalDist, fmean

import numpy as np
import scipy  # scipy.stats loads on first use: a preview needs only `smallest_detectable_lift`

from grpo_core.errors import ConfigError
from grpo_core.results import (
    EvaluationResult,
    Interval,
    ItemResult,
    LiftNumbers,
    LiftResult,
    LiftSide,
    PartLift,
    Verdict,
)

ALPHA = 0.05
POWER = 0.8
MIN_EFFECT = 0.05

# Before any data: the share of problems on which two evaluations are expected to disagree. 0.34 is the
# usual planning value for one sample per problem: variance 0.10 between problems and 0.12 within each side's
# answers, 0.10 + 2 * 0.12.
ASSUMED_DISCORDANCE = 0.34

_Z = NormalDist().inv_cdf(1 - ALPHA / 2)
_Z_POWER = _Z + NormalDist().inv_cdf(POWER)

# Random sign flips where enumerating all 2^n is too much; up to 13 differing problems it is exact.
_RESAMPLES = 9_999
_FLIP_SEED = 20_241_104

_Measure = Callable[[ItemResult], float]


@dataclass(frozen=True)
class PairedDifference:
    """Difference of paired means, policy minus baseline.

    Attributes:
        discordance: mean squared difference; for pass/fail, the share of problems that changed.
        test: name of the test behind `p_value`.
    """

    baseline: float
    policy: float
    lift: float
    ci95: Interval
    p_value: float
    test: str
    discordance: float


def compare(baseline: EvaluationResult, policy: EvaluationResult, min_effect: float = MIN_EFFECT) -> LiftResult:
    """Paired lift of `policy` over `baseline`, matched by problem id whatever the order of the items.

    The verdict is about the pass rate alone; mean reward and parts are shown with their own p-values,
    uncorrected for their number. With several samples per problem, a problem is `fixed` when its share
    of passing samples rose and `broken` when it fell.

    Args:
        min_effect: smallest pass-rate lift that matters, which separates `no_evidence` from `underpowered`.

    Raises:
        ConfigError: when settings or problems differ, or one side is empty, holds a completion twice or
            has a number that is not finite.
    """
    _refuse_different_settings(baseline, policy)
    _refuse_different_problems(baseline, policy)

    def difference(measure: _Measure) -> PairedDifference:
        return paired_difference(_problem_means(baseline, measure), _problem_means(policy, measure))

    ids = sorted({item.id for item in baseline.per_task})
    changes = _problem_means(policy, _passed) - _problem_means(baseline, _passed)
    passed, reward = difference(_passed), difference(_reward)
    parts = {name: difference(_part(name)) for name in _part_names(baseline, policy)}
    detectable = smallest_detectable_lift(len(ids), passed.discordance)
    ci95 = _within(passed.ci95, -1.0, 1.0)
    return LiftResult(
        verdict=decide(passed.p_value, ci95, detectable, min_effect),
        num_tasks=len(ids),
        baseline=_side(
            passed.baseline, reward.baseline, {name: part.baseline for name, part in parts.items()}, len(ids)
        ),
        policy=_side(passed.policy, reward.policy, {name: part.policy for name, part in parts.items()}, len(ids)),
        lift=LiftNumbers(
            pass_rate=passed.lift,
            ci95=ci95,
            p_value=passed.p_value,
            test=passed.test,
            mean_reward=reward.lift,
            mean_reward_ci95=reward.ci95,
            mean_reward_p_value=reward.p_value,
            parts={
                name: PartLift(
                    baseline=part.baseline, policy=part.policy, lift=part.lift, ci95=part.ci95, p_value=part.p_value
                )
                for name, part in parts.items()
            },
        ),
        fixed=[id for id, change in zip(ids, changes, strict=True) if change > 0],
        broken=[id for id, change in zip(ids, changes, strict=True) if change < 0],
        smallest_detectable_lift=detectable,
        min_effect=min_effect,
        settings_hash=baseline.settings_hash,
    )


def decide(p_value: float, ci95: Interval, detectable: float, min_effect: float) -> Verdict:
    """The verdict: significant, and its interval free of 0; else whether there were enough problems to tell."""
    low, high = ci95
    if p_value < ALPHA and low > 0:
        return "improved"
    if p_value < ALPHA and high < 0:
        return "regressed"
    return "underpowered" if detectable > min_effect else "no_evidence"


def paired_difference(baseline: np.ndarray, policy: np.ndarray) -> PairedDifference:
    """Difference of the means of two paired samples, one value per problem, in the same order.

    When every value is 0 or 1: exact McNemar test and Tango's score interval. Otherwise: sign-flip
    permutation test and t interval of the differences.

    Args:
        baseline: float64[problems].
        policy: float64[problems].
    """
    differences = policy - baseline
    if np.isin(np.concatenate([baseline, policy]), (0.0, 1.0)).all():
        fixed, broken = int((differences > 0).sum()), int((differences < 0).sum())
        ci95 = tango_interval(fixed, broken, differences.size)
        p_value, test = mcnemar_p_value(fixed, broken), "exact McNemar"
    else:
        ci95 = mean_interval(differences)
        p_value, test = sign_flip_p_value(differences), "paired permutation"
    return PairedDifference(
        baseline=float(baseline.mean()),
        policy=float(policy.mean()),
        lift=float(differences.mean()),
        ci95=ci95,
        p_value=p_value,
        test=test,
        discordance=float(np.square(differences).mean()),
    )


def wilson_interval(successes: float, n: int) -> Interval:
    """Wilson's 95 % score interval of a proportion (Wilson 1927, JASA 22:209-212).

    `successes` may be fractional, the sum of pass shares over problems. Without any data it is (0, 1).
    """
    centre = (successes + _Z**2 / 2) / (n + _Z**2)
    spread = successes * (n - successes) / n if n else 0.0
    half = _Z * math.sqrt(spread + _Z**2 / 4) / (n + _Z**2)
    return _within((centre - half, centre + half), 0.0, 1.0)


def mcnemar_p_value(fixed: int, broken: int) -> float:
    """Two-sided exact McNemar: of the problems that changed, is half `fixed` plausible? 1 when none changed."""
    if fixed + broken == 0:
        return 1.0
    return float(scipy.stats.binomtest(fixed, fixed + broken, 0.5).pvalue)


def tango_score(fixed: int, broken: int, n: int, delta: float) -> float:
    """Score statistic of H0 "the paired difference of proportions is `delta`", falling in `delta`.

    Tango 1998, Statistics in Medicine 17:891-908, equations 24 to 26, with its margin at -delta: the
    share of broken problems is estimated by maximum likelihood under H0. At delta 0 it is McNemar's z.
    """
    excess = fixed - broken - n * delta
    if excess == 0:
        return 0.0  # also where nothing changed, or everything did: 0/0 there
    b = -fixed - broken + (2 * n - fixed + broken) * delta
    c = -broken * delta * (1 - delta)
    broken_share = (math.sqrt(max(b * b - 8 * n * c, 0.0)) - b) / (4 * n)
    return excess / math.sqrt(n * (2 * broken_share + delta * (1 - delta)))


def tango_interval(fixed: int, broken: int, n: int) -> Interval:
    """95 % interval of the paired difference (fixed - broken) / n: all values that `tango_score` does not reject.

    It stays within [-1, 1] and does not collapse when nothing changed: then it is ±z²/(n + z²).
    """

    def edge(stop: float) -> float:
        inside = (fixed - broken) / n
        # Sixty halvings of at most 2 end below the spacing of floats; a root finder would stop at the
        # estimate itself where the score is 0/0.
        for _ in range(60):
            middle = (inside + stop) / 2
            if abs(tango_score(fixed, broken, n, middle)) <= _Z:
                inside = middle
            else:
                stop = middle
        return inside

    return edge(-1.0), edge(1.0)


def sign_flip_p_value(differences: np.ndarray) -> float:
    """Two-sided paired permutation test: under H0 each difference is as likely with the other sign.

    Exact up to 13 differences other than 0, else 9,999 flips from a fixed seed. Differences of 0 have no
    sign to flip; the rest are sorted so that the order of problems cannot change the drawn flips.
    """
    changed = np.sort(differences[differences != 0])
    if changed.size < 2:
        return 1.0
    result = scipy.stats.permutation_test(
        (changed,),
        np.mean,
        permutation_type="samples",
        n_resamples=_RESAMPLES,
        rng=np.random.default_rng(_FLIP_SEED),
    )
    return float(result.pvalue)


def mean_interval(differences: np.ndarray) -> Interval:
    """95 % t interval of the mean of paired differences.

    Differences that are all equal (or only one) show no spread, and a t interval would claim certainty.
    Then it is what Tango's interval is for pass/fail where nothing changed, ±z²/(n + z²), around the
    common value: rewards are taken to have a range of 1.
    """
    n, mean = differences.size, float(differences.mean())
    if np.ptp(differences) < 1e-12:
        half = _Z**2 / (n + _Z**2)
    else:
        half = float(scipy.stats.t.ppf(1 - ALPHA / 2, n - 1) * differences.std(ddof=1)) / math.sqrt(n)
    return mean - half, mean + half


def smallest_detectable_lift(num_problems: int, discordance: float = ASSUMED_DISCORDANCE) -> float:
    """Smallest pass-rate lift that this many problems show with 80 % power, two-sided at 0.05.

    n = z² · variance / δ² with z = z_{0.025} + z_{0.2} (Miller, arXiv 2411.00640), solved for the lift δ,
    where the variance of a paired pass/fail difference is discordance - δ². A lift of δ needs a
    discordance of at least δ, so a discordance too small to hold the answer (none observed, say) is
    raised to it: the result is never below z² / (n + z²).

    Args:
        discordance: share of problems on which the two sides differ; with several samples per problem
            the mean squared difference of their pass shares.
    """
    least = _Z_POWER**2 / (num_problems + _Z_POWER**2)
    return _Z_POWER * math.sqrt(max(discordance, least) / (num_problems + _Z_POWER**2))


def _passed(item: ItemResult) -> float:
    return float(item.passed)


def _reward(item: ItemResult) -> float:
    return item.reward


def _part(name: str) -> _Measure:
    # An item that failed has no parts; like its reward they count as 0.
    return lambda item: item.parts.get(name, 0.0)


def _part_names(*evaluations: EvaluationResult) -> list[str]:
    return sorted({name for evaluation in evaluations for item in evaluation.per_task for name in item.parts})


def _problem_means(evaluation: EvaluationResult, measure: _Measure) -> np.ndarray:
    """float64[problems]: the mean over each problem's samples, problems sorted by id."""
    samples = defaultdict(list)
    for item in evaluation.per_task:
        samples[item.id].append(measure(item))
    return np.array([fmean(samples[id]) for id in sorted(samples)])


def _side(pass_rate: float, mean_reward: float, parts: dict[str, float], problems: int) -> LiftSide:
    interval = wilson_interval(pass_rate * problems, problems)
    return LiftSide(pass_rate=pass_rate, pass_rate_ci95=interval, mean_reward=mean_reward, parts=parts)


def _within(interval: Interval, low: float, high: float) -> Interval:
    return max(interval[0], low), min(interval[1], high)


def _refuse_different_settings(baseline: EvaluationResult, policy: EvaluationResult) -> None:
    if baseline.settings_hash == policy.settings_hash:
        return
    ours, theirs = baseline.settings, policy.settings
    differing = {
        key: (ours.get(key), theirs.get(key))
        for key in sorted(ours.keys() | theirs.keys())
        if ours.get(key) != theirs.get(key)
    } or {"settings_hash": (baseline.settings_hash, policy.settings_hash)}
    values = ", ".join(f"{key} ({a!r} in the baseline, {b!r} in the policy)" for key, (a, b) in differing.items())
    raise ConfigError(
        f"its evaluation has other settings than the baseline's: {values}",
        field="policy",
        hint="evaluate both with the same settings",
    )


def _refuse_different_problems(baseline: EvaluationResult, policy: EvaluationResult) -> None:
    ours, theirs = _completion_keys(baseline, "baseline"), _completion_keys(policy, "policy")
    if ours != theirs:
        raise ConfigError(
            f"its evaluation has other problems than the baseline's: {len(ours - theirs)} only in the baseline"
            f"{_examples(ours - theirs)}, {len(theirs - ours)} only in the policy{_examples(theirs - ours)}",
            field="policy",
            hint="evaluate both on the same problems, with as many samples of each",
        )


def _completion_keys(evaluation: EvaluationResult, side: str) -> set[tuple[str, int]]:
    """The (problem id, sample) of every completion, each there once and with finite numbers."""
    if not evaluation.per_task:
        raise ConfigError("its evaluation has no per_task items", field=side, hint="give the full evaluation document")
    counts = Counter((item.id, item.sample) for item in evaluation.per_task)
    if repeated := {key for key, count in counts.items() if count > 1}:
        raise ConfigError(f"its evaluation holds {len(repeated)} completions twice{_examples(repeated)}", field=side)
    odd = {
        (item.id, item.sample)
        for item in evaluation.per_task
        if not all(map(math.isfinite, (item.reward, *item.parts.values())))
    }
    if odd:
        raise ConfigError(
            f"its evaluation holds {len(odd)} rewards or parts that are not finite{_examples(odd)}", field=side
        )
    return set(counts)


def _examples(keys: Iterable[tuple[str, int]]) -> str:
    shown = [f"{id!r} sample {sample}" for id, sample in sorted(keys)[:3]]
    return f" (for example {', '.join(shown)})" if shown else ""
