"""SFT and GRPO for real, on tiny random models: what a run does."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import Recorder

from grpo_core import training
from grpo_core.checkpoints import CheckpointStore
from grpo_core.config import EvalConfig, GRPOConfig, SFTConfig
from grpo_core.environments.base import Score
from grpo_core.errors import ConfigError, TrainingFailed
from grpo_core.evaluation import evaluate
from grpo_core.grpo import train_grpo
from grpo_core.policies.adapters import AdaptedLinear
from grpo_core.policies.peft_lora import PeftLoraPolicy, read_adapter_tensors
from grpo_core.progress import Silent
from grpo_core.results import TrainingResult
from grpo_core.sft import train_sft


@pytest.mark.parametrize("tiny_model_dir", ["llama", "qwen3", "mistral"], indirect=True)
def test_every_architecture_goes_through_sft_grpo_and_evaluation(
    common: dict[str, Any], sft: Callable[..., SFTConfig], grpo: Callable[..., GRPOConfig], tmp_path: Path
) -> None:
    started = train_sft(sft(), Silent())
    assert (started.status, started.steps, started.partial) == ("completed", 3, False)
    trained = train_grpo(grpo(init_checkpoint_dir=started.checkpoint_dir, kl_beta=0.05), Silent())
    assert (trained.status, trained.steps) == ("completed", 5)
    assert trained.initial_digest == started.digest != trained.digest
    config = {**common, "policy": "peft-lora", "checkpoint_dir": trained.checkpoint_dir, "num_tasks": 3}
    scored = evaluate(EvalConfig.parse(config), str(tmp_path / "eval"), Silent())
    assert scored.checkpoint_digest == trained.digest
    assert [item.index for item in scored.per_task] == [0, 1, 2]


def test_sft_learns_its_examples(sft: Callable[..., SFTConfig]) -> None:
    heard = Recorder()
    train_sft(sft(epochs=20), heard)
    losses = heard.series("loss")
    assert len(losses) == 60 and losses[-1] < 0.5 * losses[0]


def test_grpo_raises_the_reward(grpo: Callable[..., GRPOConfig]) -> None:
    heard = Recorder()
    train_grpo(grpo(prompts=60, group_size=8), heard)
    rewards = heard.series("reward")
    assert len(rewards) == 30
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.2


def test_seed_decides_the_digest(grpo: Callable[..., GRPOConfig], tmp_path: Path) -> None:
    digests = [
        train_grpo(grpo(seed=seed, checkpoint_dir=str(tmp_path / name)), Silent()).digest
        for seed, name in ((7, "a"), (7, "b"), (8, "c"))
    ]
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize(("reference", "zero"), [("init", True), ("base", False)])
def test_kl_of_a_warm_start_begins_at_its_reference(
    sft: Callable[..., SFTConfig], grpo: Callable[..., GRPOConfig], reference: str, zero: bool
) -> None:
    started = train_sft(sft(), Silent())
    heard = Recorder()
    train_grpo(grpo(init_checkpoint_dir=started.checkpoint_dir, kl_beta=0.1, kl_reference=reference), heard)
    kl = heard.series("kl")
    assert (kl[0] == 0.0) is zero
    assert all(value > 0 for value in kl[1:])


@pytest.mark.parametrize(("cohort", "splits"), [("held_out", {"validation"}), ("train", {"train"})])
def test_cohort_decides_what_is_evaluated_after_sft(
    sft: Callable[..., SFTConfig], monkeypatch: pytest.MonkeyPatch, cohort: str, splits: set[str]
) -> None:
    assert _validated_splits(sft(eval_cohort=cohort, eval_examples=6), monkeypatch) == splits


def test_whole_cohort_is_drawn_from_both(sft: Callable[..., SFTConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    config = sft(eval_cohort="all", eval_examples=12)
    assert _validated_splits(config, monkeypatch) == {"train", "validation"}


def _validated_splits(config: SFTConfig, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    seen: set[str] = set()

    def validate(policy: Any, environment: Any, problems: Any, *_: Any) -> dict[str, float]:
        seen.update(problem.split for problem in problems)
        return {}

    monkeypatch.setattr("grpo_core.sft.validate", validate)
    train_sft(config, Silent())
    return seen


def test_empty_cohort_is_refused_before_training(sft: Callable[..., SFTConfig], tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "a", "completion": "b"}\n' * 4)
    with pytest.raises(ConfigError, match="no example is in the cohort 'held_out'"):
        train_sft(sft(dataset=str(path), split_ratio=1.0), Silent())


def test_l1_shrinks_the_adapter(sft: Callable[..., SFTConfig], tmp_path: Path) -> None:
    def size(coefficient: float) -> float:
        folder = str(tmp_path / str(coefficient))
        train_sft(sft(l1_coef=coefficient, epochs=5, checkpoint_dir=folder), Silent())
        tensors = read_adapter_tensors(Path(folder))
        return sum(float(tensor.abs().sum()) for tensor in tensors.values())

    assert size(1000.0) < 0.5 * size(0.0)


def constant(self: Any, problem: Any, completion: str) -> Score:
    return Score(1.0)


def test_run_without_signal_fails_early(grpo: Callable[..., GRPOConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    config = grpo(prompts=60, weight_decay=0.5)
    _patch_score(monkeypatch, constant)
    heard = Recorder()
    with pytest.raises(TrainingFailed, match="no signal in 10 steps") as failed:
        train_grpo(config, heard)
    assert failed.value.code == "NO_SIGNAL" and failed.value.exit_code == 1
    assert len(heard.steps) == 10  # not 30
    assert heard.series("frac_reward_zero_std") == [1.0] * 10
    assert heard.series("grad_norm") == [0.0] * 10
    store = CheckpointStore(str(config.checkpoint_dir))
    assert store.result() is None
    assert [(manifest.step, manifest.partial) for manifest in store.manifests()] == [(0, False), (10, True)]


def test_steps_too_long_for_prefects_own_cancellation_are_warned_about_once(
    sft: Callable[..., SFTConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def warnings(name: str) -> list[str]:
        heard = Recorder()
        train_sft(sft(checkpoint_dir=str(tmp_path / name)), heard)
        return [notice.message for notice in heard.notices if notice.level == "warning"]

    assert warnings("usual") == []
    monkeypatch.setattr(training, "LONG_STEP_S", 0.0)
    (said,) = warnings("long")
    assert said.startswith("a step takes 0 s: Prefect's own cancel button kills a job after 30 s")


def test_too_small_a_learning_rate_is_no_success(
    sft: Callable[..., SFTConfig], grpo: Callable[..., GRPOConfig]
) -> None:
    started = train_sft(sft(epochs=4), Silent()).checkpoint_dir  # no weight is zero, so 1e-30 is lost in rounding
    with pytest.raises(TrainingFailed, match="the policy did not change"):
        train_grpo(grpo(lr=1e-30, init_checkpoint_dir=started), Silent())


def test_policy_without_parameters_is_refused(grpo: Callable[..., GRPOConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PeftLoraPolicy, "trainable_parameters", lambda self: {})
    with pytest.raises(ConfigError, match="no trainable parameters"):
        train_grpo(grpo(), Silent())


def test_reward_that_raises_on_one_item_in_eight_is_counted(
    grpo: Callable[..., GRPOConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = iter(range(10**6))
    config = grpo()
    score = _environment_class(config).score

    def flaky(self: Any, problem: Any, completion: str) -> Score:
        if next(calls) % 8 == 3:
            raise RuntimeError("judge is down")
        return score(self, problem, completion)

    _patch_score(monkeypatch, flaky)
    heard = Recorder()
    assert train_grpo(config, heard).status == "completed"
    assert heard.series("invalid") == [1.0] * 5  # 2 prompts x 4 completions a step
    broken = [row for row in heard.steps[0].completions if not row["valid"]]
    assert [row["advantage"] for row in broken] == [0.0]


def test_reward_that_mostly_raises_fails_with_the_first_error(
    grpo: Callable[..., GRPOConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = grpo()

    def down(self: Any, problem: Any, completion: str) -> Score:
        raise RuntimeError("judge is down")

    _patch_score(monkeypatch, down)
    with pytest.raises(TrainingFailed, match=r"8 of 8 completions of step 1.*RuntimeError: judge is down"):
        train_grpo(config, Silent())


def test_gradients_do_not_depend_on_the_micro_batch(grpo: Callable[..., GRPOConfig], tmp_path: Path) -> None:
    norms, losses = [], []
    for tokens in (1, 150, 100_000):
        heard = Recorder()
        config = grpo(
            prompts_per_step=5, micro_batch_tokens=tokens, checkpoint_dir=str(tmp_path / str(tokens)), kl_beta=0.1
        )
        train_grpo(config, heard)
        norms.append(heard.series("grad_norm")[0])
        losses.append(heard.series("loss")[0])
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-4) and norms[0] > 0
    assert losses == pytest.approx([losses[0]] * 3, abs=1e-6)


def test_gradient_checkpointing_computes_twice_and_changes_nothing(
    grpo: Callable[..., GRPOConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, forward = [0], AdaptedLinear.forward

    def counted(self: AdaptedLinear, x: torch.Tensor) -> torch.Tensor:
        calls[0] += torch.is_grad_enabled()
        return forward(self, x)

    monkeypatch.setattr(AdaptedLinear, "forward", counted)
    plain = train_grpo(grpo(checkpoint_dir=str(tmp_path / "plain")), Silent())
    once, calls[0] = calls[0], 0
    saving = train_grpo(grpo(checkpoint_dir=str(tmp_path / "saving"), gradient_checkpointing=True), Silent())
    assert (calls[0], saving.digest) == (2 * once, plain.digest)


def test_first_update_is_on_policy(grpo: Callable[..., GRPOConfig]) -> None:
    heard = Recorder()
    train_grpo(grpo(lr=0.05, temperature=0.7), heard)
    # the ratio of a first update is exactly 1, so nothing clips, and at the same temperature both paths agree
    assert heard.series("clip_ratio/low") == heard.series("clip_ratio/high") == [0.0] * 5
    assert max(heard.series("sampling/logprob_difference_max")) < 1e-4


def test_later_updates_of_one_rollout_can_clip(grpo: Callable[..., GRPOConfig]) -> None:
    heard = Recorder()
    train_grpo(grpo(lr=0.05, updates_per_rollout=4), heard)
    assert max(heard.series("clip_ratio/low") + heard.series("clip_ratio/high")) > 0


def test_masked_truncation_leaves_nothing_to_train_when_all_are_cut(grpo: Callable[..., GRPOConfig]) -> None:
    with pytest.raises(TrainingFailed, match="no signal"):
        train_grpo(grpo(truncated="mask", max_new_tokens=1), Silent())


def test_evaluation_runs_before_at_and_after_its_steps(grpo: Callable[..., GRPOConfig]) -> None:
    heard = Recorder()
    result = train_grpo(grpo(eval_every=2, eval_prompts=3), heard)
    assert [event.step for event in heard.steps if "eval/reward" in event.metrics] == [0, 2, 4, 5]
    assert "eval/reward" in result.metrics


def test_group_without_signal_is_drawn_again(grpo: Callable[..., GRPOConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    config = grpo(resample_zero_variance=2)
    score = _environment_class(config).score

    def first_draw_is_flat(self: Any, problem: Any, completion: str) -> Score:
        return Score(0.0) if "resample" not in problem.id else score(self, problem, completion)

    _patch_score(monkeypatch, first_draw_is_flat)
    heard = Recorder()
    result = train_grpo(config, heard)
    assert (result.status, result.steps) == ("completed", 5)  # resampled prompts are not counted
    assert all(count >= 2 for count in heard.series("resampled"))
    assert all("resample-" in row["problem"] for event in heard.steps for row in event.completions)


def test_initial_adapter_of_another_rank_is_refused(
    sft: Callable[..., SFTConfig], grpo: Callable[..., GRPOConfig]
) -> None:
    started = train_sft(sft(), Silent())
    with pytest.raises(ConfigError, match="8 differs from the initial adapter's 4") as refused:
        train_grpo(grpo(init_checkpoint_dir=started.checkpoint_dir, lora_rank=8), Silent())
    assert refused.value.field == "lora_rank"


def test_prompt_longer_than_the_context_is_refused(grpo: Callable[..., GRPOConfig]) -> None:
    with pytest.raises(ConfigError, match="exceed the context of 8192") as refused:
        train_grpo(grpo(max_new_tokens=8190), Silent())
    assert refused.value.code == "CONTEXT_TOO_LONG"


def test_long_prompt_of_a_late_step_is_refused_before_training(
    grpo: Callable[..., GRPOConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = grpo()
    environment = _environment_class(config)
    problem = environment.problem

    def ninth_is_long(self: Any, seed: int, split: Any, index: int, stream: str = "") -> Any:
        made = problem(self, seed, split, index, stream)
        return replace(made, document="word " * 2000) if index == 8 else made

    monkeypatch.setattr(environment, "problem", ninth_is_long)
    with pytest.raises(ConfigError, match="exceed the context"):
        train_grpo(config, Silent())
    assert CheckpointStore(str(config.checkpoint_dir)).steps() == []


def test_sft_on_a_dataset(sft: Callable[..., SFTConfig], tmp_path: Path) -> None:
    rows = [{"prompt": f"Say {n}", "completion": "xyz"} for n in range(5)]
    rows += [{"messages": [{"role": "user", "content": "Hi"}], "completion": "xyz"} for _ in range(5)]
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    heard = Recorder()
    result = train_sft(sft(dataset=str(path), split_ratio=0.8, epochs=10, lr=2e-2), heard)
    assert result.steps == 20  # 8 of 10 rows x 10 epochs / 4
    assert result.metrics["eval/loss"] < 0.5 * heard.series("loss")[0]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "is empty"),
        ("{", "JSONDecodeError"),
        ('{"prompt": "x"}', "KeyError"),
        ('{"prompt": "x", "completion": 3}', "completion must be text"),
    ],
)
def test_faulty_dataset_is_refused(sft: Callable[..., SFTConfig], tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(line)
    with pytest.raises(ConfigError, match=said) as refused:
        train_sft(sft(dataset=str(path)), Silent())
    assert refused.value.field == "dataset"


def test_saved_adapter_is_what_peft_reads(grpo: Callable[..., GRPOConfig], tiny_model_dir: str) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from grpo_core.models import load_base_model
    from grpo_core.policies.adapters import applied

    result: TrainingResult = train_grpo(grpo(), Silent())
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model_dir), result.checkpoint_dir)
    base = load_base_model("smollm2-135m", tiny_model_dir, "cpu", "float32")
    policy = PeftLoraPolicy.load(base, Path(result.checkpoint_dir))
    ids = torch.tensor([[3, 1, 4, 1, 5, 9]])
    with torch.no_grad():
        bare = base.model(ids).logits
        with applied(base.model, policy.adapters([])):
            ours = base.model(ids).logits
        assert torch.allclose(ours, theirs(ids).logits, atol=1e-5)
        assert float((ours - bare).abs().max()) > 1e-3
        assert torch.equal(base.model(ids).logits, bare)  # nothing stays applied


def _environment_class(config: GRPOConfig) -> Any:
    from grpo_core.environments.registry import environment_class

    return environment_class(config.environment)


def _patch_score(monkeypatch: pytest.MonkeyPatch, score: Callable[..., Score]) -> None:
    from grpo_core.environments.registry import environment_class

    monkeypatch.setattr(environment_class("letters"), "score", score)


def test_every_metric_is_documented_and_every_documented_one_exists(
    sft: Callable[..., SFTConfig], grpo: Callable[..., GRPOConfig]
) -> None:
    table = (Path(__file__).parents[1] / "docs" / "metrics.md").read_text()
    first_cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    documented = {name for cell in first_cells for name in re.findall("`([^`]+)`", cell)}
    heard = Recorder()
    started = train_sft(sft(), heard)
    train_grpo(grpo(init_checkpoint_dir=started.checkpoint_dir, kl_beta=0.1, eval_every=2, eval_prompts=2), heard)
    emitted = {name for event in heard.steps for name in event.metrics}
    assert {re.sub("^rewards/.*", "rewards/<part>", name) for name in emitted} == documented
