"""The configuration of every job: what can be asked for, in what bounds, and what it means.

Unknown fields are refused. A field whose default is None takes the family's or the environment's
value; `resolved()` writes those values in, and the resolved config is what a run records.
Importing this module loads no torch, no Prefect and no MLflow.
"""

from __future__ import annotations

from typing import Any, Literal, Self, get_args

from pydantic import ConfigDict, Field, ValidationError, field_validator, model_validator

from grpo_core.environments.registry import environment_class, make_environment
from grpo_core.errors import ConfigError
from grpo_core.families import FAMILIES, Family, FamilyName, check_model_dir
from grpo_core.validation import StrictNumbers, config_error, refusal

MOST = 1_000_000_000
"""Bound of every count: beyond it there is a typing error, not a job."""

PolicyName = Literal["hypernet", "peft-lora"]
EvaluatedPolicy = Literal["base", "hypernet", "peft-lora"]
Device = Literal["auto", "cuda", "metal", "cpu"]
Dtype = Literal["auto", "bfloat16", "float32"]


def _refuse(field: str, message: str, hint: str, code: str = ConfigError.code) -> Exception:
    return refusal(ConfigError(message, field=field or None, hint=hint, code=code))


def _policy_is_built(policy: str) -> str:
    if policy == "hypernet":
        raise _refuse("", "'hypernet' cannot be trained or evaluated in this version", "use policy 'peft-lora'")
    return policy


def _plain_optionals(schema: dict[str, Any]) -> None:
    """Show `X | None` as X in JSON schemas: forms then draw one field instead of two tabs.

    An absent value stays valid because no such field is required.
    """
    for prop in schema.get("properties", {}).values():
        variants = prop.get("anyOf", [])
        others = [variant for variant in variants if variant.get("type") != "null"]
        if len(others) == 1 and len(variants) == 2:
            del prop["anyOf"]
            prop.update(others[0])
            prop.pop("default", None)


class Config(StrictNumbers):
    """Base of all configs: strict about names, plain in forms."""

    model_config = ConfigDict(
        extra="forbid", validate_default=True, json_schema_extra=_plain_optionals, allow_inf_nan=False
    )

    @classmethod
    def parse(cls, values: dict[str, Any]) -> Self:
        """Validate outside values.

        Raises:
            ConfigError: naming the first wrong field, its value and what to do.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise config_error(error) from None


class ComputeConfig(Config):
    """Where a job runs and what bounds its use of resources."""

    offer: str | None = Field(default=None, description="Offer id of the machine to run on; empty means this machine.")
    region: str | None = Field(default=None, description="Region of the offer.")
    gpus: int | None = Field(default=None, ge=1, description="Number of GPUs of the offer.")
    spot: bool = Field(default=False, description="Use the offer's spot price.")
    provider: str | None = Field(default=None, description="Provider of the offer.")
    max_duration_hours: float | None = Field(
        default=None, gt=0, description="Stop with a partial checkpoint after this many hours."
    )
    max_cost_gbp: float | None = Field(
        default=None, gt=0, description="Stop with a partial checkpoint at this cost; this machine costs 0."
    )


class CommonConfig(Config):
    """What every job on problems needs."""

    family: FamilyName = Field(description="Base-model family.")
    environment: str = Field(default="niah", description="Environment whose problems and reward are used.")
    environment_options: dict[str, Any] = Field(
        default={},
        description="Options of the environment (JSON object), for niah: min_blocks, max_blocks, num_keys, num_digits.",
    )
    seed: int = Field(default=0, ge=0, lt=2**63, description="Seed of problems and sampling.")
    device: Device = Field(default="auto", description="Device to compute on; auto takes the best there is.")
    dtype: Dtype = Field(
        default="auto",
        description="Number format of the base model; auto takes bfloat16 where the device computes in it.",
    )
    model_dir: str | None = Field(
        default=None, min_length=1, description="Folder with weights to use instead of the family's own."
    )
    checkpoint_dir: str | None = Field(
        default=None,
        min_length=1,
        description="Folder or URL that receives the results; empty means a new folder under the lab's artifact root. "
        "A relative path lies under that root too; ./ starts at the current folder.",
    )
    compute: ComputeConfig = Field(default=ComputeConfig(), description="Where to run and what bounds it.")

    @field_validator("family", mode="before")
    @classmethod
    def _known_family(cls, value: Any) -> Any:
        if isinstance(value, str) and value not in FAMILIES:
            raise _refuse(
                "", f"{value!r} is unknown", f"choose one of {', '.join(get_args(FamilyName))}", code="UNKNOWN_FAMILY"
            )
        return value

    @model_validator(mode="after")
    def _environment_and_model(self) -> Self:
        try:
            self.environment_options = make_environment(self.environment, self.environment_options).options.model_dump()
            if self.model_dir is not None:
                check_model_dir(self.family_spec, self.model_dir)
        except ConfigError as error:
            raise refusal(error) from None
        return self

    @property
    def family_spec(self) -> Family:
        """The family's row of the table."""
        return FAMILIES[self.family]

    def common(self) -> dict[str, Any]:
        """The fields of this class alone, for building another job on the same problems."""
        return self.model_dump(include=set(CommonConfig.model_fields))


class OptimizerSettings(Config):
    """How a training loop steps and how often it keeps its state."""

    lr: float | None = Field(default=None, gt=0, lt=1, description="Learning rate; empty takes the family's.")
    warmup_steps: int = Field(
        default=0, ge=0, le=MOST, description="Steps over which the learning rate rises linearly."
    )
    max_grad_norm: float = Field(default=1.0, gt=0, description="Gradients are scaled down to this norm.")
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW weight decay.")
    checkpoint_every: int = Field(default=10, ge=1, le=MOST, description="Steps between checkpoints.")
    keep_last: int = Field(
        default=3, ge=1, le=MOST, description="Newest checkpoints to keep, beside the first and the best validated."
    )
    keep_every: int | None = Field(
        default=None, ge=1, le=MOST, description="Keep also the checkpoints of steps that this divides; empty: none."
    )


class SFTSettings(OptimizerSettings):
    """What supervised fine-tuning needs beside the common fields."""

    examples: int = Field(default=64, ge=1, le=MOST, description="Generated environment examples.")
    dataset: str | None = Field(
        default=None,
        min_length=1,
        description="URL of a JSONL with prompt or messages, and completion, instead of generated examples.",
    )
    split_ratio: float = Field(default=0.9, gt=0, le=1, description="Share of the dataset that is trained on.")
    split_seed: int = Field(default=0, ge=0, le=MOST, description="Seed of the dataset's split.")
    eval_cohort: Literal["held_out", "train", "all"] = Field(
        default="held_out", description="What is evaluated after training."
    )
    eval_examples: int = Field(
        default=32, ge=0, le=MOST, description="Examples evaluated after training; 0 evaluates none."
    )
    examples_per_step: int = Field(
        default=8, ge=1, le=MOST, description="Examples per optimizer step; the last step may be shorter."
    )
    epochs: int = Field(default=1, ge=1, le=MOST, description="Passes over the examples.")
    lora_rank: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="Rank of the adapter; empty takes the initial adapter's or the family's.",
    )
    lora_alpha: int | None = Field(
        default=None, ge=1, le=MOST, description="LoRA alpha; empty takes the initial adapter's or the family's."
    )
    init_adapter_dir: str | None = Field(default=None, min_length=1, description="PEFT adapter to continue from.")
    l1_coef: float = Field(default=0.0, ge=0, description="Coefficient of the mean absolute LoRA weight in the loss.")
    min_blocks: int | None = Field(
        default=None, ge=1, le=MOST, description="niah only: fewest filler blocks; empty takes the environment's."
    )
    max_blocks: int | None = Field(
        default=None, ge=1, le=MOST, description="niah only: most filler blocks; empty takes the environment's."
    )
    log_every: int = Field(default=1, ge=1, le=MOST, description="Steps between progress points.")


class GRPOSettings(OptimizerSettings):
    """What GRPO needs beside the common fields and the policy."""

    init_checkpoint_dir: str | None = Field(
        default=None, min_length=1, description="PEFT adapter or hypernet directory to start from."
    )
    prompts: int = Field(
        default=160, ge=1, le=MOST, description="Training prompts in all; resampled ones are not counted."
    )
    prompts_per_step: int = Field(
        default=4, ge=1, le=MOST, description="Prompts per optimizer step; the last step may be shorter."
    )
    group_size: int = Field(
        default=8,
        ge=2,
        le=MOST,
        description="Completions per prompt; at least 2, since advantages are relative to the group.",
    )
    max_new_tokens: int | None = Field(
        default=None, ge=1, le=MOST, description="Generation budget per completion; empty takes the environment's."
    )
    temperature: float = Field(
        default=1.0, gt=0, description="Sampling temperature; all log-probabilities in the loss are at it."
    )
    lora_rank: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="peft-lora only: rank of the adapter; empty takes the initial adapter's or the family's.",
    )
    kl_beta: float = Field(default=0.0, ge=0, description="Coefficient of the KL penalty against the reference policy.")
    kl_reference: Literal["init", "base"] = Field(
        default="init", description="Reference of the KL: the policy as RL began, or the base model."
    )
    loss: Literal["grpo", "dr_grpo", "dapo", "gspo"] = Field(
        default="grpo",
        description="Mean per sequence, constant length, mean over the step's tokens, or sequence ratio.",
    )
    advantage: Literal["group_std", "group_mean", "leave_one_out"] = Field(
        default="group_std", description="How rewards become advantages within a group."
    )
    clip_low: float = Field(default=0.2, gt=0, lt=1, description="Lower clip of the ratio: 1 - clip_low.")
    clip_high: float = Field(default=0.28, gt=0, description="Upper clip of the ratio: 1 + clip_high.")
    updates_per_rollout: int = Field(default=1, ge=1, le=MOST, description="Optimizer passes over one step's rollouts.")
    truncated: Literal["keep", "mask"] = Field(
        default="keep", description="mask: truncated completions leave loss and denominator."
    )
    sampler_correction: Literal["truncate", "none"] = Field(
        default="truncate",
        description="Importance weight (truncated at 2) between the sampler's and the policy's numerics.",
    )
    resample_zero_variance: int = Field(
        default=0, ge=0, le=MOST, description="Extra attempts to find a group whose rewards differ."
    )
    eval_every: int = Field(
        default=0, ge=0, le=MOST, description="Steps between evaluations on the validation split; 0 evaluates never."
    )
    eval_prompts: int = Field(default=32, ge=1, le=MOST, description="Problems per evaluation during training.")
    micro_batch_tokens: int | None = Field(
        default=None, ge=1, le=MOST, description="Tokens per forward and backward pass; empty is automatic."
    )
    gradient_checkpointing: bool = Field(
        default=False, description="Recompute activations in the backward pass to save memory."
    )

    @field_validator("group_size", mode="before")
    @classmethod
    def _group_of_two(cls, value: Any) -> Any:
        if value in (0, 1):
            raise _refuse(
                "", f"a group of {value} has no advantage", "advantages are relative to the group; use at least 2"
            )
        return value

    @field_validator("temperature", mode="before")
    @classmethod
    def _temperature_above_zero(cls, value: Any) -> Any:
        if value == 0:
            hint = "greedy completions of a group are all equal and teach nothing; use a value above 0, such as 1.0"
            raise _refuse("", f"{value} cannot be trained at", hint)
        return value


class EvalSettings(Config):
    """What an evaluation needs beside the common fields and the policy."""

    num_tasks: int = Field(default=200, ge=1, le=MOST, description="Problems evaluated, from the eval split.")
    samples_per_problem: int = Field(
        default=1, ge=1, le=MOST, description="Completions per problem; with temperature 0 they are all equal."
    )
    max_new_tokens: int | None = Field(
        default=None, ge=1, le=MOST, description="Generation budget per completion; empty takes the environment's."
    )
    temperature: float = Field(default=0.0, ge=0, description="Sampling temperature; 0 decodes greedily.")
    pass_threshold: float | None = Field(
        default=None, description="Reward from which a completion passes; empty takes the environment's."
    )


class D2LSettings(Config):
    """What training a hypernetwork needs beside the common fields."""

    examples: int = Field(default=640, ge=1, le=MOST, description="Generated documents.")
    examples_per_step: int = Field(default=32, ge=1, le=MOST, description="Documents per optimizer step.")
    eval_examples: int = Field(default=32, ge=0, le=MOST, description="Documents evaluated after training.")
    epochs: int = Field(default=1, ge=1, le=MOST, description="Passes over the documents.")
    lr: float | None = Field(default=None, gt=0, lt=1, description="Learning rate; empty takes the family's.")
    l1_coef: float = Field(default=0.0, ge=0, description="Coefficient of the L1 penalty on generated adapters.")


class SFTConfig(CommonConfig, SFTSettings):
    """Supervised fine-tuning of a plain PEFT LoRA adapter."""

    @model_validator(mode="after")
    def _blocks_are_niahs(self) -> Self:
        blocks = {name: value for name in ("min_blocks", "max_blocks") if (value := getattr(self, name)) is not None}
        if blocks and self.dataset is not None:
            raise _refuse(next(iter(blocks)), "a dataset has no blocks to choose", "leave it out")
        if blocks and self.environment != "niah":
            raise _refuse(
                next(iter(blocks)),
                f"only niah has blocks, this job's environment is {self.environment!r}",
                "leave it out",
            )
        if blocks:
            try:
                self.environment_options = make_environment(
                    "niah", {**self.environment_options, **blocks}
                ).options.model_dump()
            except ConfigError as error:
                raise refusal(error) from None
        return self

    def resolved(self) -> Self:
        """The config with the family's values written in; those of an initial adapter stay its own."""
        preset = self.family_spec.lora
        update: dict[str, Any] = {"lr": self.lr or preset.lr}
        if self.init_adapter_dir is None:
            update |= {"lora_rank": self.lora_rank or preset.rank, "lora_alpha": self.lora_alpha or preset.alpha}
        return self.model_copy(update=update)


class GRPOConfig(CommonConfig, GRPOSettings):
    """Reinforcement learning with GRPO."""

    policy: PolicyName = Field(
        default="hypernet", description="What is trained: peft-lora (most users want this) or hypernet."
    )

    _built = field_validator("policy")(_policy_is_built)

    def resolved(self) -> Self:
        """The config with the family's and the environment's values written in; an initial adapter keeps its own."""
        preset, environment = self.family_spec.lora, environment_class(self.environment)
        update: dict[str, Any] = {"lr": self.lr or preset.lr}
        update |= {"max_new_tokens": self.max_new_tokens or environment.max_new_tokens}
        if self.init_checkpoint_dir is None:
            update |= {"lora_rank": self.lora_rank or preset.rank}
        return self.model_copy(update=update)


class EvalConfig(CommonConfig, EvalSettings):
    """Evaluation of a policy on the eval split."""

    policy: EvaluatedPolicy = Field(default="base", description="Policy to score: base, peft-lora or hypernet.")
    checkpoint_dir: str | None = Field(
        default=None,
        min_length=1,
        description="Checkpoint folder, job or adapter directory of the policy to score; not for base.",
    )

    _built = field_validator("policy")(_policy_is_built)

    @model_validator(mode="after")
    def _checkpoint_of_policy(self) -> Self:
        if self.policy != "base" and self.checkpoint_dir is None:
            hint = "use policy 'base' to evaluate the bare model"
            raise _refuse("checkpoint_dir", f"policy {self.policy!r} needs the folder of its checkpoint", hint)
        if self.policy == "base" and self.checkpoint_dir is not None:
            hint = "name the policy to evaluate, such as peft-lora"
            raise _refuse("checkpoint_dir", f"{self.checkpoint_dir!r}: policy 'base' reads no checkpoint", hint)
        return self

    def resolved(self) -> Self:
        """The config with the environment's values written in."""
        environment = environment_class(self.environment)
        return self.model_copy(
            update={
                "max_new_tokens": self.max_new_tokens or environment.max_new_tokens,
                "pass_threshold": environment.pass_threshold if self.pass_threshold is None else self.pass_threshold,
            }
        )


class PipelineConfig(CommonConfig):
    """Preview, SFT, GRPO, evaluations of base, warm start and policy, and the lift report."""

    policy: PolicyName = Field(default="peft-lora", description="What is trained: peft-lora or hypernet.")
    sft: SFTSettings = Field(default=SFTSettings(), description="The supervised cold start.")
    d2l: D2LSettings = Field(default=D2LSettings(), description="Training of the hypernetwork (policy hypernet only).")
    rl: GRPOSettings = Field(default=GRPOSettings(), description="Reinforcement learning from the cold start.")
    eval: EvalSettings = Field(default=EvalSettings(), description="The evaluations that the lift compares.")
    register_as: str | None = Field(default=None, description="Name under which an improved adapter is registered.")

    _built = field_validator("policy")(_policy_is_built)

    @model_validator(mode="after")
    def _stages(self) -> Self:
        if self.register_as is not None:
            raise _refuse(
                "register_as", f"{self.register_as!r}: registering is not possible in this version", "leave it out"
            )
        if self.rl.init_checkpoint_dir is not None:
            hint = "use sft.init_adapter_dir to start from an adapter"
            raise _refuse("rl.init_checkpoint_dir", "in a pipeline RL starts from the SFT stage", hint)
        if self.d2l != D2LSettings():
            raise _refuse("d2l", "only policy 'hypernet' trains a hypernetwork", "leave these fields out")
        rank = self.sft.lora_rank or self.family_spec.lora.rank
        if self.sft.init_adapter_dir is None and self.rl.lora_rank not in (None, rank):
            hint = "leave it out to continue the SFT stage's adapter, or set sft.lora_rank"
            raise _refuse("rl.lora_rank", f"{self.rl.lora_rank} differs from the SFT stage's {rank}", hint)
        # Conflicts between a stage and the common fields must show before anything runs.
        try:
            self.sft_stage(checkpoint_dir=None)
            self.rl_stage(init_checkpoint_dir=None, checkpoint_dir=None)
        except ValidationError as error:
            raise refusal(config_error(error)) from None
        return self

    def resolved(self) -> Self:
        """The config with the values of family and environment written into its stages."""
        # RL continues the SFT stage's adapter, wherever that will lie, so its rank stays that adapter's.
        rl = self.rl_stage(init_checkpoint_dir="sft", checkpoint_dir=None).resolved()
        sft = self.sft_stage(checkpoint_dir=None).resolved()
        evaluation = self.eval_stage("base", None).resolved()
        return self.model_copy(
            update={
                "sft": SFTSettings(**sft.model_dump(include=set(SFTSettings.model_fields))),
                "rl": GRPOSettings(
                    **{**rl.model_dump(include=set(GRPOSettings.model_fields)), "init_checkpoint_dir": None}
                ),
                "eval": EvalSettings(**evaluation.model_dump(include=set(EvalSettings.model_fields))),
            }
        )

    def sft_stage(self, checkpoint_dir: str | None) -> SFTConfig:
        """The SFT stage as a job of its own."""
        return SFTConfig(**{**self.common(), **self.sft.model_dump(), "checkpoint_dir": checkpoint_dir})

    def rl_stage(self, init_checkpoint_dir: str | None, checkpoint_dir: str | None) -> GRPOConfig:
        """The RL stage as a job of its own."""
        fields = {**self.common(), **self.rl.model_dump(), "policy": self.policy}
        return GRPOConfig(**{**fields, "init_checkpoint_dir": init_checkpoint_dir, "checkpoint_dir": checkpoint_dir})

    def eval_stage(self, policy: EvaluatedPolicy, checkpoint_dir: str | None) -> EvalConfig:
        """One of the three evaluations as a job of its own."""
        return EvalConfig(
            **{**self.common(), **self.eval.model_dump(), "policy": policy, "checkpoint_dir": checkpoint_dir}
        )
