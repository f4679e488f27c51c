"""What a request may say: defaults, bounds, conflicts, and errors that name field, value and remedy."""

from typing import Any

import pytest

from grpo_core.config import EvalConfig, GRPOConfig, PipelineConfig, SFTConfig
from grpo_core.errors import ConfigError
from grpo_core.families import FAMILIES

SMOL = {"family": "smollm2-135m"}


@pytest.mark.parametrize(
    ("config", "request_", "field", "said"),
    [
        (SFTConfig, {}, "family", "a value is required"),
        (SFTConfig, {"family": "gpt-5"}, "family", "'gpt-5' is unknown"),
        (SFTConfig, {**SMOL, "exmaples": 3}, "exmaples", "unknown field"),
        (SFTConfig, {**SMOL, "examples": 0}, "examples", "greater than or equal to 1, got 0"),
        (SFTConfig, {**SMOL, "examples": 10**400}, "examples", "less than or equal to 1000000000"),
        (SFTConfig, {**SMOL, "examples": True}, "examples", "True is no number"),
        (SFTConfig, {**SMOL, "lr": float("nan")}, "lr", "finite number"),
        (SFTConfig, {**SMOL, "lr": "fast"}, "lr", "got 'fast'"),
        (SFTConfig, {**SMOL, "device": "tpu"}, "device", "got 'tpu'"),
        (SFTConfig, {**SMOL, "checkpoint_dir": ""}, "checkpoint_dir", "at least 1 character"),
        (SFTConfig, {**SMOL, "environment": "zz"}, "environment", "'zz' is not installed"),
        (SFTConfig, {**SMOL, "environment_options": {"q": 1}}, "environment_options.q", "unknown field"),
        (
            SFTConfig,
            {**SMOL, "environment_options": {"min_blocks": True}},
            "environment_options.min_blocks",
            "no number",
        ),
        (SFTConfig, {**SMOL, "min_blocks": 9}, "environment_options.min_blocks", "9 is more than max_blocks"),
        (SFTConfig, {**SMOL, "dataset": "x.jsonl", "max_blocks": 2}, "max_blocks", "a dataset has no blocks"),
        (GRPOConfig, {**SMOL, "policy": "peft-lora", "group_size": 1}, "group_size", "a group of 1 has no advantage"),
        (GRPOConfig, {**SMOL, "policy": "peft-lora", "temperature": 0}, "temperature", "0 cannot be trained at"),
        (GRPOConfig, {**SMOL}, "policy", "'hypernet' cannot be trained or evaluated"),
        (EvalConfig, {**SMOL, "num_tasks": 0}, "num_tasks", "greater than or equal to 1, got 0"),
        (PipelineConfig, {**SMOL, "rl": {"group_size": 1}}, "rl.group_size", "a group of 1 has no advantage"),
        (PipelineConfig, {**SMOL, "rl": 5}, "rl", "got 5"),
        (PipelineConfig, {**SMOL, "rl": {"lora_rank": 8}}, "rl.lora_rank", "8 differs from the SFT stage's 16"),
        (
            PipelineConfig,
            {**SMOL, "rl": {"init_checkpoint_dir": "x"}},
            "rl.init_checkpoint_dir",
            "RL starts from the SFT",
        ),
        (PipelineConfig, {**SMOL, "register_as": "x"}, "register_as", "registering is not possible"),
    ],
)
def test_faulty_request_is_refused_by_name(config: Any, request_: dict[str, Any], field: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config.parse(request_)
    assert refused.value.field == field and said in refused.value.message
    assert refused.value.exit_code == 2


def test_every_faulty_field_is_named() -> None:
    with pytest.raises(ConfigError, match=r"lr: .*also wrong: examples, nonsense"):
        SFTConfig.parse({**SMOL, "examples": 0, "lr": -1, "nonsense": 1})


def test_resolved_config_holds_the_values_of_family_and_environment() -> None:
    preset = FAMILIES["smollm2-135m"].lora
    sft = SFTConfig.parse(SMOL).resolved()
    assert (sft.lr, sft.lora_rank, sft.lora_alpha) == (preset.lr, preset.rank, preset.alpha)
    assert sft.environment_options == {"min_blocks": 1, "max_blocks": 4, "num_keys": 4, "num_digits": 4}
    rl = GRPOConfig.parse({**SMOL, "policy": "peft-lora"}).resolved()
    assert (rl.max_new_tokens, rl.lora_rank) == (16, preset.rank)
    assert EvalConfig.parse(SMOL).resolved().pass_threshold == 1.0
    for config in (sft, rl):
        assert config.resolved() == config


def test_an_initial_adapter_keeps_its_own_rank() -> None:
    rl = GRPOConfig.parse({**SMOL, "policy": "peft-lora", "init_checkpoint_dir": "/x"}).resolved()
    assert rl.lora_rank is None


def test_stages_of_a_pipeline_share_their_common_fields() -> None:
    pipeline = PipelineConfig.parse({**SMOL, "seed": 7, "environment_options": {"num_keys": 2}, "dtype": "float32"})
    stages = (pipeline.sft_stage("/sft"), pipeline.rl_stage("/sft", "/rl"), pipeline.eval_stage("base", None))
    for stage in stages:
        assert (stage.seed, stage.environment_options["num_keys"], stage.dtype) == (7, 2, "float32")
    assert pipeline.resolved().resolved() == pipeline.resolved()


def test_config_survives_json() -> None:
    pipeline = PipelineConfig.parse(SMOL).resolved()
    assert PipelineConfig.parse(pipeline.model_dump(mode="json")) == pipeline
