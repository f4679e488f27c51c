"""Evaluation: the same problems for every policy, and nothing left out of the mean."""

from pathlib import Path
from typing import Any

import pytest

from grpo_core.config import EvalConfig
from grpo_core.environments import registry
from grpo_core.environments.base import Score
from grpo_core.errors import ConfigError, NotFoundError
from grpo_core.evaluation import evaluate, read_evaluation, summary
from grpo_core.lift import wilson_interval
from grpo_core.progress import Silent, StopNow, StopReason
from grpo_core.results import ItemResult


@pytest.fixture
def request_(tiny_model_dir: str) -> dict[str, Any]:
    return {
        "family": "smollm2-135m",
        "model_dir": tiny_model_dir,
        "environment": "letters",
        "num_tasks": 20,
        "device": "cpu",
        "dtype": "float32",
    }


def item(reward: float, error: str | None = None) -> ItemResult:
    return ItemResult(
        id="x", index=0, seed=0, completion="", expected="", reward=reward, parts={"contains": reward},
        passed=reward >= 1, tokens=1, truncated=False, error=error,
    )  # fmt: skip


def test_failed_items_count_as_zero_and_are_shown() -> None:
    # five right, five that could not be scored: 0.5 and not 1.0
    figures = summary([item(1.0)] * 5 + [item(0.0, "RuntimeError: down")] * 5)
    assert (figures["mean_reward"], figures["pass_rate"], figures["failed"]) == (0.5, 0.5, 5)
    assert figures["parts"] == {"contains": 0.5}


def test_interval_counts_problems_and_not_their_samples() -> None:
    # 4 samples each of 10 problems, half of them right: Wilson for 5 of 10, not for 20 of 40
    items = [item(float(n % 2)).model_copy(update={"id": str(n % 10)}) for n in range(40)]
    assert summary(items)["pass_rate_ci95"] == wilson_interval(5, 10) != wilson_interval(20, 40)


def test_repeated_problems_are_refused_before_any_weight_is_read(
    request_: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EvalConfig.parse(request_)
    environment = registry.environment_class("letters")
    problem = environment.problem
    monkeypatch.setattr(
        environment, "problem", lambda self, seed, split, i, stream="": problem(self, seed, split, i % 7)
    )
    with pytest.raises(ConfigError, match="only 7 distinct problems at 20 places") as refused:
        evaluate(config, str(tmp_path), Silent())
    assert refused.value.field == "num_tasks"


def test_result_is_the_mean_of_its_items_in_problem_order(request_: dict[str, Any], tmp_path: Path) -> None:
    result = evaluate(EvalConfig.parse(request_), str(tmp_path), Silent())
    assert [row.index for row in result.per_task] == list(range(20))
    assert len({row.id for row in result.per_task}) == 20
    assert all(row.id.split("-")[1] == "eval" for row in result.per_task)
    assert result.mean_reward == pytest.approx(sum(row.reward for row in result.per_task) / 20)
    assert read_evaluation(str(tmp_path)) == result


def test_reward_errors_are_recorded_item_by_item(
    request_: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flaky(self: Any, problem: Any, completion: str) -> Score:
        if problem.index % 2:
            raise RuntimeError("judge is down")
        return Score(1.0)

    config = EvalConfig.parse(request_)
    monkeypatch.setattr(registry.environment_class("letters"), "score", flaky)
    result = evaluate(config, str(tmp_path), Silent())
    assert (result.pass_rate, result.failed) == (0.5, 10)
    assert result.per_task[1].error == "RuntimeError: judge is down"


def test_stored_evaluation_is_returned_only_for_the_same_settings(
    request_: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = evaluate(EvalConfig.parse(request_), str(tmp_path), Silent())
    assert evaluate(EvalConfig.parse(request_), str(tmp_path), Silent()) == first
    other = evaluate(EvalConfig.parse({**request_, "seed": 1}), str(tmp_path), Silent())
    assert other.settings_hash != first.settings_hash
    assert {row.id for row in other.per_task}.isdisjoint(row.id for row in first.per_task)


def test_several_samples_share_their_problems_id(request_: dict[str, Any], tmp_path: Path) -> None:
    config = EvalConfig.parse({**request_, "num_tasks": 3, "samples_per_problem": 4, "temperature": 1.0})
    result = evaluate(config, str(tmp_path), Silent())
    assert [(row.index, row.sample) for row in result.per_task] == [(i, s) for i in range(3) for s in range(4)]
    assert len({row.completion for row in result.per_task[:4]}) > 1


def test_batching_does_not_change_a_greedy_completion(
    request_: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = evaluate(EvalConfig.parse(request_), str(tmp_path / "a"), Silent())
    monkeypatch.setattr("grpo_core.evaluation.BATCH_PROMPTS", 1)
    alone = evaluate(EvalConfig.parse(request_), str(tmp_path / "b"), Silent())
    assert [row.completion for row in alone.per_task] == [row.completion for row in together.per_task]


def test_stop_leaves_no_half_result(request_: dict[str, Any], tmp_path: Path) -> None:
    class Impatient(Silent):
        def stop_requested(self) -> StopReason:
            return StopReason.TIME_CEILING

    with pytest.raises(StopNow, match="time_ceiling"):
        evaluate(EvalConfig.parse(request_), str(tmp_path), Impatient())
    with pytest.raises(NotFoundError):
        read_evaluation(str(tmp_path))


def test_policy_and_checkpoint_belong_together(request_: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="needs the folder of its checkpoint"):
        EvalConfig.parse({**request_, "policy": "peft-lora"})
    with pytest.raises(ConfigError, match="policy 'base' reads no checkpoint"):
        EvalConfig.parse({**request_, "checkpoint_dir": "/x"})
