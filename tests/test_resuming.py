"""SFT and GRPO stopped, repeated, extended and continued: nothing is lost, repeated or silently different."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from loops import Recorder

from grpo_core import training
from grpo_core.checkpoints import CheckpointStore
from grpo_core.config import GRPOConfig, SFTConfig
from grpo_core.errors import CheckpointConflict
from grpo_core.grpo import train_grpo
from grpo_core.progress import Silent
from grpo_core.sft import train_sft


@pytest.mark.parametrize("job", ["sft", "grpo"])
def test_stopped_run_continues_bit_for_bit(
    job: str, sft: Callable[..., SFTConfig], grpo: Callable[..., GRPOConfig], tmp_path: Path
) -> None:
    config, train = {"sft": (sft, train_sft), "grpo": (grpo, train_grpo)}[job]
    extra: dict[str, Any] = {"warmup_steps": 3, "checkpoint_every": 2}
    extra |= {"kl_beta": 0.1, "updates_per_rollout": 2} if job == "grpo" else {"epochs": 2}
    straight, first, second = Recorder(), Recorder(stop_after=3), Recorder()
    expected = train(config(checkpoint_dir=str(tmp_path / "whole"), **extra), straight)

    stopped = train(config(checkpoint_dir=str(tmp_path / "parts"), **extra), first)
    assert (stopped.status, stopped.stop_reason, stopped.partial, stopped.steps) == ("cancelled", "cancelled", True, 3)
    assert stopped.digest not in (expected.digest, expected.initial_digest)
    latest = CheckpointStore(stopped.checkpoint_dir).latest()
    assert latest is not None and (latest.step, latest.partial) == (3, True)

    finished = train(config(checkpoint_dir=str(tmp_path / "parts"), **extra), second)
    assert (finished.status, finished.digest) == ("completed", expected.digest)
    for name in ("loss", "grad_norm", "lr", "num_tokens"):
        assert first.series(name) + second.series(name) == straight.series(name)


@pytest.mark.parametrize("job", ["sft", "grpo"])
def test_stop_at_any_moment_loses_and_repeats_nothing(
    job: str, sft: Callable[..., SFTConfig], grpo: Callable[..., GRPOConfig], tmp_path: Path
) -> None:
    # A stop can be seen between tokens, micro-batches, steps and in the middle of a validation: each
    # question of the loop (of GRPO's every third) is answered with a stop, once.
    config, train = {"sft": (sft, train_sft), "grpo": (grpo, train_grpo)}[job]
    extra: dict[str, Any] = {"checkpoint_every": 2}
    if job == "grpo":
        extra |= {"prompts": 6, "kl_beta": 0.1, "updates_per_rollout": 2, "eval_every": 1, "eval_prompts": 2}
        extra |= {"micro_batch_tokens": 1, "max_new_tokens": 3}
    whole = Recorder()
    expected = train(config(checkpoint_dir=str(tmp_path / "whole"), **extra), whole)
    counter = Recorder(stop_at_ask=10**9)
    train(config(checkpoint_dir=str(tmp_path / "count"), **extra), counter)
    assert counter.asked > (5 if job == "sft" else 30)
    stopped_at = set()
    for ask in range(1, counter.asked + 1, 1 if job == "sft" else 3):
        folder = str(tmp_path / str(ask))
        stopped = train(config(checkpoint_dir=folder, **extra), Recorder(stop_at_ask=ask))
        assert stopped.status == "cancelled"
        stopped_at.add(stopped.steps)
        finished = train(config(checkpoint_dir=folder, **extra), Silent())
        assert (finished.status, finished.partial, finished.digest) == ("completed", False, expected.digest)
        assert finished.metrics["loss"] == expected.metrics["loss"]
        latest = CheckpointStore(folder).latest()
        assert latest is not None and not latest.partial
    assert stopped_at >= {0, 1, 2}


def test_stop_before_the_first_step_keeps_the_initial_policy(grpo: Callable[..., GRPOConfig]) -> None:
    stopped = train_grpo(grpo(), Recorder(stop_after=0))
    assert (stopped.status, stopped.steps, stopped.digest) == ("cancelled", 0, stopped.initial_digest)


def test_finished_run_returns_its_result_and_trains_nothing(grpo: Callable[..., GRPOConfig]) -> None:
    first = train_grpo(grpo(), Silent())
    again = Recorder()
    assert train_grpo(grpo(), again) == first
    assert again.steps == []


def test_another_configuration_in_the_same_folder_is_refused_by_name(grpo: Callable[..., GRPOConfig]) -> None:
    train_grpo(grpo(), Recorder(stop_after=1))
    with pytest.raises(CheckpointConflict, match=r"group_size was 4, now 5, lr was 0\.01, now 0\.02") as refused:
        train_grpo(grpo(group_size=5, lr=0.02), Silent())
    assert refused.value.exit_code == 2
    with pytest.raises(CheckpointConflict, match="prompts was 10, now 8"):
        train_grpo(grpo(prompts=8), Silent())
    compute = {"max_duration_hours": 2}
    assert train_grpo(grpo(checkpoint_every=3, compute=compute), Silent()).status == "completed"


def test_changed_warm_start_in_the_same_place_is_refused(
    sft: Callable[..., SFTConfig], grpo: Callable[..., GRPOConfig], tmp_path: Path
) -> None:
    started = train_sft(sft(), Silent()).checkpoint_dir
    first = train_grpo(grpo(init_checkpoint_dir=started), Silent())
    train_sft(sft(examples=24), Silent())  # the same folder holds another adapter now
    with pytest.raises(CheckpointConflict, match="initial adapter was"):
        train_grpo(grpo(init_checkpoint_dir=started), Silent())
    shutil.rmtree(started)  # gone altogether: the finished run does not need it
    assert train_grpo(grpo(init_checkpoint_dir=started), Silent()) == first


def test_unfinished_run_continues_without_its_initial_adapter(
    sft: Callable[..., SFTConfig], grpo: Callable[..., GRPOConfig], tmp_path: Path
) -> None:
    started = train_sft(sft(), Silent()).checkpoint_dir
    whole = train_grpo(grpo(init_checkpoint_dir=started, checkpoint_dir=str(tmp_path / "whole")), Silent())
    train_grpo(grpo(init_checkpoint_dir=started), Recorder(stop_after=2))
    shutil.rmtree(started)
    assert train_grpo(grpo(init_checkpoint_dir=started), Silent()).digest == whole.digest


def test_changed_dataset_in_the_same_place_is_refused(sft: Callable[..., SFTConfig], tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "a", "completion": "b"}\n' * 4)
    train_sft(sft(dataset=str(path)), Silent())
    path.write_text('{"prompt": "a", "completion": "c"}\n' * 4)
    with pytest.raises(CheckpointConflict, match="dataset was"):
        train_sft(sft(dataset=str(path)), Silent())


def test_more_prompts_extend_a_finished_run_without_a_gap(grpo: Callable[..., GRPOConfig], tmp_path: Path) -> None:
    # 6 prompts by 4 end with a short step; 10 more go on from the seventh prompt, none left out or repeated
    heard = Recorder()
    train_grpo(grpo(prompts=6, prompts_per_step=4, checkpoint_dir=str(tmp_path / "x")), heard)
    extended = train_grpo(grpo(prompts=14, prompts_per_step=4, checkpoint_dir=str(tmp_path / "x")), heard)
    assert (extended.status, extended.steps) == ("completed", 4)
    shown = [row["problem"] for event in heard.steps for row in event.completions]
    assert {name.rpartition("-")[2] for name in shown} == {
        "0",
        "1",
        "4",
        "5",
        "6",
        "7",
        "10",
        "11",
    }  # two groups a step


def test_folder_of_another_kind_of_run_is_refused(
    sft: Callable[..., SFTConfig], grpo: Callable[..., GRPOConfig]
) -> None:
    folder = train_sft(sft(), Silent()).checkpoint_dir
    with pytest.raises(CheckpointConflict, match="holds the checkpoints of a run of kind 'sft', not 'rl'"):
        train_grpo(grpo(checkpoint_dir=folder), Silent())


def test_other_numeric_layout_is_refused(grpo: Callable[..., GRPOConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    train_grpo(grpo(), Recorder(stop_after=1))
    monkeypatch.setattr(training.torch, "get_num_threads", lambda: 64)
    with pytest.raises(CheckpointConflict, match=r"threads was \d+, now 64"):
        train_grpo(grpo(), Silent())


def test_training_over_memory_filesystem(grpo: Callable[..., GRPOConfig], tmp_path: Path) -> None:
    local = train_grpo(grpo(checkpoint_dir=str(tmp_path / "local")), Silent())
    remote = train_grpo(grpo(checkpoint_dir="memory://runs/rl"), Silent())
    assert remote.checkpoint_dir == "memory://runs/rl" or remote.checkpoint_dir == "memory:///runs/rl"
    assert remote.digest == local.digest
    assert train_grpo(grpo(checkpoint_dir="memory://runs/rl"), Silent()) == remote
