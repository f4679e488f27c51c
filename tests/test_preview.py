"""What a preview counts and refuses, without loading a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_core.compute import preview as planning
from grpo_core.config import EvalConfig, GRPOConfig, PipelineConfig, SFTConfig
from grpo_core.errors import AdmissionRefused, ConfigError, NotFoundError
from grpo_core.lift import smallest_detectable_lift


def pipeline_config(**changes: object) -> PipelineConfig:
    fields = {
        "family": "smollm2-135m",
        "sft": {"examples": 20, "examples_per_step": 8, "epochs": 2, "eval_examples": 5},
        "rl": {"prompts": 10, "prompts_per_step": 4, "group_size": 3, "max_new_tokens": 7, "resample_zero_variance": 1},
        "eval": {"num_tasks": 30, "max_new_tokens": 7},
    }
    return PipelineConfig.parse({**fields, **changes})


def test_a_pipelines_counts_are_the_sum_of_its_stages() -> None:
    plan = planning.preview(pipeline_config())
    assert plan.estimate is not None
    # SFT: ceil(20 / 8) = 3 steps, twice. RL: ceil(10 / 4) = 3 steps.
    assert plan.estimate.steps == 6 + 3
    # SFT evaluates 5; RL samples 10 prompts at most twice each; three evaluations of 30.
    assert plan.estimate.prompts == 5 + 20 + 90
    # One completion each, but 3 per RL prompt.
    assert plan.estimate.rollouts == 5 + 60 + 90
    # The SFT stage evaluates with the environment's budget of 16 tokens.
    assert plan.estimate.tokens == 5 * 16 + 60 * 7 + 90 * 7
    assert plan.estimate.cost_gbp is None and plan.estimate.duration_s is None


def test_a_datasets_steps_are_unknown() -> None:
    plan = planning.preview(SFTConfig(family="smollm2-135m", dataset=Path(__file__).as_uri()))
    assert plan.launchable
    assert plan.estimate is not None and plan.estimate.steps is None


def test_validation_during_training_is_counted() -> None:
    settings = {"prompts": 40, "prompts_per_step": 4, "group_size": 2, "eval_prompts": 6}

    def prompts(eval_every: int) -> int:
        job = {"family": "smollm2-135m", "policy": "peft-lora", **settings, "eval_every": eval_every}
        estimate = planning.preview(GRPOConfig.parse(job)).estimate
        assert estimate is not None
        return estimate.prompts

    # 10 steps are evaluated on 6 prompts at 0, 3, 6, 9 and 10; at 0, 5 and 10; at 0 and 10.
    assert [prompts(every) for every in (3, 5, 99)] == [40 + 5 * 6, 40 + 3 * 6, 40 + 2 * 6]


def test_too_few_problems_are_warned_about_with_their_number() -> None:
    few = planning.preview(pipeline_config())
    assert [warning.code for warning in few.warnings] == ["UNDERPOWERED"]
    assert few.warnings[0].field == "eval.num_tasks"
    assert few.statistics.smallest_detectable_lift == smallest_detectable_lift(30)
    many = planning.preview(EvalConfig(family="smollm2-135m", num_tasks=5_000))
    assert many.warnings == []


def test_the_plan_hash_depends_on_what_is_done_and_not_on_how_it_was_said() -> None:
    spelled_out = pipeline_config(policy="peft-lora", environment_options={"min_blocks": 1})
    assert planning.preview(pipeline_config()).plan_hash == planning.preview(spelled_out).plan_hash
    assert planning.preview(pipeline_config()).plan_hash != planning.preview(pipeline_config(seed=1)).plan_hash


@pytest.mark.parametrize(("device", "system"), [("metal", "Linux"), ("cuda", "Linux")])
def test_a_device_that_is_not_there_is_refused_and_is_a_blocker(
    monkeypatch: pytest.MonkeyPatch, device: str, system: str
) -> None:
    monkeypatch.setattr(planning.platform, "system", lambda: system)
    monkeypatch.setattr(planning, "_has_nvidia_driver", lambda: False)
    config = pipeline_config(device=device)
    with pytest.raises(ConfigError, match=f"'{device}' needs") as refusal:
        planning.admit(config)
    assert (refusal.value.field, refusal.value.exit_code) == ("device", 2)
    plan = planning.preview(config)
    assert not plan.launchable
    assert [(blocker.code, blocker.field) for blocker in plan.blockers] == [("DEVICE_MISSING", "device")]


@pytest.mark.parametrize(
    ("name", "value"), [("offer", "h100"), ("region", "eu"), ("gpus", 2), ("spot", True), ("provider", "acme")]
)
def test_another_machine_is_refused_and_is_a_blocker(name: str, value: object) -> None:
    config = pipeline_config(compute={name: value, "max_cost_gbp": 1.0})
    with pytest.raises(AdmissionRefused) as refusal:
        planning.admit(config)
    assert refusal.value.exit_code == 3
    (blocker,) = planning.preview(config).blockers
    assert (blocker.code, blocker.field) == ("OFFER_NOT_FOUND", f"compute.{name}")


def test_an_input_that_does_not_exist_is_named(tmp_path: Path) -> None:
    missing = str(tmp_path / "nothing")
    config = GRPOConfig(family="smollm2-135m", policy="peft-lora", init_checkpoint_dir=missing)
    with pytest.raises(NotFoundError, match="nothing") as refusal:
        planning.admit(config)
    assert refusal.value.field == "init_checkpoint_dir"
    (tmp_path / "nothing").mkdir()
    planning.admit(config)


def test_a_faulty_request_is_a_preview_too() -> None:
    request = {"family": "gpt-2", "compute": "a lot"}
    with pytest.raises(ConfigError) as refusal:
        PipelineConfig.parse(request)
    plan = planning.refused(request, refusal.value)
    assert (plan.launchable, plan.launched, plan.plan_hash, plan.config, plan.compute) == (
        False,
        False,
        None,
        request,
        {},
    )
    assert (plan.blockers[0].code, plan.blockers[0].field) == ("UNKNOWN_FAMILY", "family")


def test_folder_of_another_run_blocks_before_anything_starts(tmp_path: Path, tiny_model_dir: str) -> None:
    from grpo_core.progress import Silent
    from grpo_core.sft import train_sft

    request = {"family": "smollm2-135m", "model_dir": tiny_model_dir, "environment": "letters", "examples": 2}
    request |= {"checkpoint_dir": str(tmp_path), "eval_examples": 0, "lr": 0.01}
    train_sft(SFTConfig.parse(request), Silent())
    assert planning.preview(SFTConfig.parse(request)).launchable
    (blocker,) = planning.preview(SFTConfig.parse({**request, "lr": 0.02})).blockers
    assert (blocker.code, blocker.field) == ("CHECKPOINT_CONFLICT", "checkpoint_dir")
    assert "lr was 0.01, now 0.02" in blocker.message


@pytest.mark.parametrize("place", ["file/below", "foo://bar"])
def test_place_that_cannot_be_written_blocks(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    folder = place if "://" in place else str(tmp_path / place)
    (blocker,) = planning.preview(SFTConfig.parse({"family": "smollm2-135m", "checkpoint_dir": folder})).blockers
    assert blocker.code == "CONFIG_INVALID" and place in blocker.message
