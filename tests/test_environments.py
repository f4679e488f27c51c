"""What every environment gets from base.py and registry.py, and how a config refuses its options."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from grpo_core.config import EvalConfig
from grpo_core.environments import registry
from grpo_core.environments.base import Draws, Environment, EnvironmentOptions, Problem, Score, Split
from grpo_core.environments.niah import Niah
from grpo_core.environments.registry import GROUP, environment_class, environment_names, make_environment
from grpo_core.errors import ConfigError

PROBLEM = Problem("p", "eval", 0, 0, None, "?", "!")


class Judge(Environment):
    """An environment whose score is whatever `verdict` returns or raises."""

    name = "judge"
    description = "Scores by a given function."

    def __init__(self, verdict: Callable[[], Score]):
        super().__init__(EnvironmentOptions())
        self.verdict = verdict

    def problem(self, seed: int, split: Split, index: int, stream: str = "") -> Problem:
        return Problem(f"{stream}{index}", split, seed, index, None, "?", "!")

    def score(self, problem: Problem, completion: str) -> Score:
        return self.verdict()


# --- Draws -------------------------------------------------------------------------------------------------


def uniform(text: bytes) -> float:
    """The leading 53 of SHA-256's 256 bits as a fraction, by another route than the code's."""
    return (int(hashlib.sha256(text).hexdigest(), 16) >> 203) / 2**53


def test_draws_are_hashes_of_address_and_count():
    draws = Draws("niah", 0, "train")
    assert [draws.uniform() for _ in range(3)] == [uniform(b"niah\x1f0\x1ftrain\x1e%d" % n) for n in range(3)]


def test_draws_do_not_mix_up_the_parts_of_an_address():
    assert Draws("a", 11).uniform() != Draws("a", 1, 1).uniform()
    assert Draws("ab", "c").uniform() != Draws("a", "bc").uniform()


def test_integer_reaches_both_ends_and_nothing_else():
    draws = Draws("dice")
    rolls = [draws.integer(1, 6) for _ in range(200)]
    assert set(rolls) == {1, 2, 3, 4, 5, 6}
    # The same numbers by the definition: 1 + floor(6 u).
    assert rolls[:5] == [1 + math.floor(6 * uniform(b"dice\x1e%d" % n)) for n in range(5)]


def test_choice_takes_the_item_of_its_integer():
    assert Draws("x").choice("abcdef") == "abcdef"[math.floor(6 * uniform(b"x\x1e0"))]


# --- checked_score -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("reward", [0.0, 0.25, 1.0])
def test_checked_score_returns_valid_scores_unchanged(reward: float):
    score = Score(reward, {"part": 2.0})
    assert Judge(lambda: score).checked_score(PROBLEM, "") is score


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        (math.nan, "reward nan is not a finite number"),
        (math.inf, "reward inf is not a finite number"),
        (-math.inf, "reward -inf is not a finite number"),
        (1.5, "reward 1.5 is not in [0.0, 1.0]"),
        (-0.1, "reward -0.1 is not in [0.0, 1.0]"),
        ("1", "TypeError: must be real number, not str"),
        (None, "TypeError: must be real number, not NoneType"),
    ],
)
def test_checked_score_refuses_what_is_not_a_number_in_the_range(reward: Any, said: str):
    assert Judge(lambda: Score(reward)).checked_score(PROBLEM, "") == said


def test_checked_score_refuses_a_part_that_is_not_finite():
    said = Judge(lambda: Score(1.0, {"style": math.nan})).checked_score(PROBLEM, "")
    assert said == "style nan is not a finite number"


def test_checked_score_refuses_no_score_at_all():
    said = Judge(lambda: None).checked_score(PROBLEM, "")
    assert said == "AttributeError: 'NoneType' object has no attribute 'reward'"


def test_checked_score_honours_the_environments_own_range():
    class Signed(Judge):
        reward_range = (-1.0, 1.0)

    score = Score(-0.5)
    assert Signed(lambda: score).checked_score(PROBLEM, "") is score


def test_checked_score_says_what_a_raising_environment_raised():
    def verdict() -> Score:
        raise ZeroDivisionError("no words")

    assert Judge(verdict).checked_score(PROBLEM, "") == "ZeroDivisionError: no words"


def test_problems_are_consecutive_addresses():
    problems = Judge(lambda: Score(0.0)).problems(5, "validation", count=3, stream="s", start=2)
    assert [(p.seed, p.split, p.id) for p in problems] == [(5, "validation", f"s{index}") for index in (2, 3, 4)]


# --- The registry ------------------------------------------------------------------------------------------


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two installed packages: one offers an environment, the other something else under the same group."""
    entries = (EntryPoint("judge", f"{__name__}:Judge", GROUP), EntryPoint("broken", "json:JSONDecoder", GROUP))
    monkeypatch.setattr(registry, "entry_points", lambda group: entries if group == GROUP else ())
    environment_class.cache_clear()
    yield
    environment_class.cache_clear()


@pytest.mark.usefixtures("installed")
def test_environments_of_other_packages_go_by_their_entry_points():
    assert environment_names() == ["broken", "judge", "niah"]
    assert environment_class("judge").name == "judge"
    assert environment_class("niah") is Niah


@pytest.mark.usefixtures("installed")
def test_unknown_environment_is_refused_with_the_installed_ones():
    with pytest.raises(ConfigError) as caught:
        make_environment("hay", {})
    assert caught.value.as_dict() == {
        "code": "UNKNOWN_ENVIRONMENT",
        "message": "'hay' is not installed",
        "hint": "installed: broken, judge, niah",
        "field": "environment",
    }


@pytest.mark.usefixtures("installed")
def test_entry_point_that_is_no_environment_is_refused():
    with pytest.raises(ConfigError, match=r"'json:JSONDecoder' is not a subclass of Environment") as caught:
        environment_class("broken")
    assert caught.value.field == "environment"


# --- Options -----------------------------------------------------------------------------------------------

WRONG_OPTIONS = [
    ({"depth": 3}, "depth", "unknown field"),
    ({"min_blocks": 3, "max_blocks": 2}, "min_blocks", "3 is more than max_blocks, which is 2"),
    # The default maximum is 4.
    ({"min_blocks": 5}, "min_blocks", "5 is more than max_blocks, which is 4"),
    # Values of one digit: 1 to 9; of two: 10 to 99.
    ({"num_keys": 10, "num_digits": 1}, "num_keys", "10 needles need as many values, but num_digits 1 has 9"),
    ({"num_keys": 65}, "num_keys", "Input should be less than or equal to 64, got 65"),
    ({"num_keys": 0}, "num_keys", "Input should be greater than or equal to 1, got 0"),
    ({"num_digits": 13}, "num_digits", "Input should be less than or equal to 12, got 13"),
    ({"num_digits": 0}, "num_digits", "Input should be greater than or equal to 1, got 0"),
    ({"min_blocks": 0}, "min_blocks", "Input should be greater than or equal to 1, got 0"),
    ({"max_blocks": 4097}, "max_blocks", "Input should be less than or equal to 4096, got 4097"),
]


@pytest.mark.parametrize(("options", "field", "message"), WRONG_OPTIONS)
def test_wrong_options_are_refused_by_name(options: dict[str, Any], field: str, message: str):
    def parse() -> EvalConfig:
        return EvalConfig.parse({"family": "smollm2-135m", "environment_options": options})

    for build in (lambda: make_environment("niah", options), parse):
        with pytest.raises(ConfigError) as caught:
            build()
        assert (caught.value.field, caught.value.message) == (f"environment_options.{field}", message)


def test_config_refuses_unknown_environments():
    with pytest.raises(ConfigError, match="'hay' is not installed") as caught:
        EvalConfig.parse({"family": "smollm2-135m", "environment": "hay"})
    assert (caught.value.field, caught.value.code) == ("environment", "UNKNOWN_ENVIRONMENT")


def test_config_records_every_option():
    config = EvalConfig.parse({"family": "smollm2-135m", "environment_options": {"num_keys": "9", "num_digits": 1}})
    assert config.environment_options == {"min_blocks": 1, "max_blocks": 4, "num_keys": 9, "num_digits": 1}
