"""Evaluations interrupted and called again: finished batches are never done twice, and the result is the same."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
from loops import Audience, Letters, Recorder

from grpo_core import evaluation
from grpo_core.checkpoints import CheckpointStore
from grpo_core.config import EvalConfig, SFTConfig
from grpo_core.environments.base import Problem, Score, Split
from grpo_core.evaluation import evaluate, read_evaluation
from grpo_core.progress import Notice, Silent, StopNow
from grpo_core.results import EvaluationResult
from grpo_core.sampling import Samples, TorchSampler
from grpo_core.sft import train_sft
from grpo_core.unfinished import FinishedBatches
from lab import texts

Prompts = list[tuple[int, ...]]


@pytest.fixture(params=["local", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "eval") if request.param == "local" else f"memory://{tmp_path.name}/eval"


@pytest.fixture
def config(common: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., EvalConfig]:
    """Makes configs of three batches, sampled in a format in which a completion depends on its batch."""

    def of_mixed_lengths(self: Letters, seed: int, split: Split, index: int, stream: str = "") -> Problem:
        # batches go by length, so that problems next to each other are in different ones
        return Problem(f"{seed}-{split}-{index}", split, seed, index, None, f"Say {'ab' * (index % 3)}{index}.", "ab")

    monkeypatch.setattr(Letters, "problem", of_mixed_lengths)
    defaults = {**common, "num_tasks": 40, "samples_per_problem": 2, "temperature": 1.0, "dtype": "bfloat16"}
    return lambda **given: EvalConfig.parse({**defaults, **given})


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> list[Prompts]:
    """The prompts of every batch that is sampled to its end."""
    batches: list[Prompts] = []
    sample = TorchSampler.sample

    def noted(self: TorchSampler, prompts: Any, *args: Any, **named: Any) -> Samples:
        samples = sample(self, prompts, *args, **named)
        batches.append([tuple(prompt) for prompt in prompts])
        return samples

    monkeypatch.setattr(TorchSampler, "sample", noted)
    return batches


def interrupt(config: EvalConfig, folder: str, after: int = 2) -> None:
    """Stop an evaluation between the first tokens of the batch after so many."""
    with pytest.raises(StopNow):
        evaluate(config, folder, Audience(stop_after=after))


def content(result: EvaluationResult) -> EvaluationResult:
    """All of a result but its duration, which differs between any two."""
    return result.model_copy(update={"duration_s": 0.0})


def left(folder: str) -> list[str]:
    """Names of what lies in an evaluation's folder."""
    fs, path = fsspec.core.url_to_fs(folder)
    return sorted(each.rsplit("/", 1)[1] for each in fs.ls(path, detail=False))


def test_interrupted_evaluation_goes_on_behind_its_last_batch(
    config: Callable[..., EvalConfig], folder: str, sampled: list[Prompts], tmp_path: Path
) -> None:
    whole = evaluate(config(), str(tmp_path / "whole"), Silent())
    expected = sampled[:]
    assert [len(batch) for batch in expected] == [16, 16, 8]
    sampled.clear()
    first, second = Audience(stop_after=1), Audience()
    with pytest.raises(StopNow):
        evaluate(config(), folder, first)
    assert left(folder) == ["evaluation.unfinished"]
    result = evaluate(config(), folder, second)
    assert sampled == expected
    assert (first.batches, second.batches) == ([1], [2, 3])
    assert (first.notices, second.notices) == ([], [Notice("info", "resuming the evaluation after batch 1 of 3")])
    assert content(result) == content(whole)
    assert [item.index for item in result.per_task] == [index for index in range(40) for _ in range(2)]
    assert read_evaluation(folder) == result
    assert left(folder) == ["evaluation.json"]


def test_stop_at_any_moment_repeats_no_finished_batch(
    config: Callable[..., EvalConfig], sampled: list[Prompts], tmp_path: Path
) -> None:
    counter = Recorder()
    whole = evaluate(config(), str(tmp_path / "whole"), counter)
    expected = sampled[:]
    before = set()
    # a stop can be seen before each batch and between its tokens: every fourth question is answered with one, once
    for ask in range(1, counter.asked + 1, 4):
        sampled.clear()
        folder = str(tmp_path / str(ask))
        with pytest.raises(StopNow):
            evaluate(config(), folder, Recorder(stop_at_ask=ask))
        before.add(len(sampled))
        assert content(evaluate(config(), folder, Silent())) == content(whole)
        assert sampled == expected
    assert before == {0, 1, 2}


@pytest.mark.parametrize("other", ["settings", "checkpoint", "threads", "partition", "prompts"])
def test_what_another_evaluation_left_is_not_mixed_in(
    other: str,
    config: Callable[..., EvalConfig],
    sft: Callable[..., SFTConfig],
    sampled: list[Prompts],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trained = train_sft(sft(eval_examples=0), Silent()).checkpoint_dir
    fields = {"policy": "peft-lora", "checkpoint_dir": trained}
    folder = str(tmp_path / "eval")
    interrupt(config(**fields), folder)
    if other == "settings":
        fields["pass_threshold"] = 0.5
    elif other == "checkpoint":
        fields["checkpoint_dir"] = f"{trained}/step-000000"
    elif other == "threads":
        monkeypatch.setattr("torch.get_num_threads", lambda: 64)
    elif other == "partition":
        monkeypatch.setattr(evaluation, "BATCH_PROMPTS", 20)
    else:  # the environment asks something else under the same ids
        problem = Letters.problem
        asked = lambda *address: replace(known := problem(*address), question=known.question.replace("Say", "Put"))  # noqa: E731
        monkeypatch.setattr(Letters, "problem", asked)
    sampled.clear()
    audience = Audience()
    result = evaluate(config(**fields), folder, audience)
    assert sum(map(len, sampled)) == 40 and audience.notices == []
    assert content(result) == content(evaluate(config(**fields), str(tmp_path / "fresh"), Silent()))
    assert left(folder) == ["evaluation.json"]


def test_other_evaluation_takes_the_place_of_the_one_before(
    config: Callable[..., EvalConfig], sampled: list[Prompts], tmp_path: Path
) -> None:
    folder = str(tmp_path)
    interrupt(config(), folder, after=2)
    interrupt(config(pass_threshold=0.5), folder, after=1)
    sampled.clear()
    result = evaluate(config(pass_threshold=0.5), folder, Silent())
    # the second batch there was the other evaluation's
    assert [len(batch) for batch in sampled] == [16, 8]
    assert content(result) == content(evaluate(config(pass_threshold=0.5), str(tmp_path / "fresh"), Silent()))


@pytest.mark.parametrize("broken", [b"", b'{"evaluation": {"sett', b"\xff\xfe", b"[]", b'{"items": []}'])
def test_broken_batch_is_done_again(
    broken: bytes, config: Callable[..., EvalConfig], folder: str, sampled: list[Prompts], tmp_path: Path
) -> None:
    whole = evaluate(config(), str(tmp_path / "whole"), Silent())
    interrupt(config(), folder)
    fs, path = fsspec.core.url_to_fs(folder)
    fs.pipe_file(f"{path}/evaluation.unfinished/000002.json", broken)
    sampled.clear()
    assert content(evaluate(config(), folder, Silent())) == content(whole)
    assert [len(batch) for batch in sampled] == [16, 8]


def test_killed_before_and_after_the_result_is_written(
    config: Callable[..., EvalConfig], folder: str, sampled: list[Prompts], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def die(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(evaluation, "write_json", die)
        evaluate(config(), folder, Silent())
    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(FinishedBatches, "remove", die)
        evaluate(config(), folder, Silent())
    written = read_evaluation(folder)
    assert left(folder) == ["evaluation.json", "evaluation.unfinished"]
    assert evaluate(config(), folder, Silent()) == written
    assert left(folder) == ["evaluation.json"]
    assert [len(batch) for batch in sampled] == [16, 16, 8]


def test_batches_that_cannot_be_deleted_do_not_fail_the_evaluation(
    config: Callable[..., EvalConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("not yours")

    monkeypatch.setattr(FinishedBatches, "remove", refuse)
    audience = Audience()
    assert evaluate(config(), str(tmp_path), audience) == read_evaluation(str(tmp_path))
    assert [notice.level for notice in audience.notices] == ["warning"]


def test_each_completion_is_scored_once_and_its_error_stays(
    config: Callable[..., EvalConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored: list[int] = []
    down = True

    def judged(self: Letters, problem: Problem, completion: str) -> Score:
        scored.append(problem.index)
        if down:
            raise RuntimeError("judge is down")
        return Score(1.0)

    monkeypatch.setattr(Letters, "score", judged)
    interrupt(config(), str(tmp_path), after=1)
    first, down = set(scored), False
    result = evaluate(config(), str(tmp_path), Silent())
    assert sorted(scored) == [index for index in range(40) for _ in range(2)]
    assert {item.index for item in result.per_task if item.error == "RuntimeError: judge is down"} == first
    assert (len(first), result.failed) == (16, 32)


def test_partial_checkpoint_is_named_as_such(
    config: Callable[..., EvalConfig], sft: Callable[..., SFTConfig], sampled: list[Prompts], tmp_path: Path
) -> None:
    trained = train_sft(sft(eval_examples=0), Recorder(stop_after=1)).checkpoint_dir
    fields = {"policy": "peft-lora", "num_tasks": 4}
    for step, partial in (("step-000000", False), ("step-000001", True)):
        named = evaluate(config(checkpoint_dir=f"{trained}/{step}", **fields), str(tmp_path / step), Silent())
        assert named.partial is partial
    folder = str(tmp_path / "eval")
    stopped = evaluate(config(checkpoint_dir=trained, **fields), folder, Silent())
    assert stopped.partial
    assert "peft-lora of smollm2-135m (partial checkpoint)" in shown(stopped)

    store = CheckpointStore(trained)
    store.mark(store.manifests()[-1], partial=False)  # as a run does that goes on and has nothing left to do
    sampled.clear()
    unmarked = evaluate(config(checkpoint_dir=trained, **fields), folder, Silent())
    assert unmarked == stopped.model_copy(update={"partial": False}) == read_evaluation(folder)
    assert sampled == []
    assert "partial" not in shown(unmarked)


def shown(result: EvaluationResult) -> str:
    return "\n".join(map(str, texts.evaluation({**result.document(), "status": "completed", "url": "x"})))
