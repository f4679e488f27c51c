"""The documents that jobs return and store as JSON. Field names are part of the contract."""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Interval = tuple[float, float]

EVALUATION_FILE = "evaluation.json"
"""What an evaluation is called in its folder."""
Verdict = Literal["improved", "regressed", "underpowered", "no_evidence"]


class Result(BaseModel):
    """Base of all result documents."""

    model_config = ConfigDict(extra="forbid")

    def document(self) -> dict[str, Any]:
        """The JSON-ready document; a number that JSON cannot hold is null."""
        return _finite(self.model_dump(mode="json"))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class ItemResult(Result):
    """One completion of one problem. With several samples per problem, items share an `id`."""

    id: str
    index: int
    sample: int = 0
    seed: int
    depth: float | None = None
    blocks: int | None = None
    completion: str
    expected: str
    reward: float
    parts: dict[str, float]
    passed: bool
    tokens: int
    truncated: bool
    error: str | None = None


class EvaluationResult(Result):
    """Scores of one policy on one set of problems. A failed item counts as reward 0 and is shown."""

    job_id: str | None = None
    family: str
    environment: str
    policy: str
    checkpoint_dir: str | None
    checkpoint_digest: str | None = Field(
        default=None, description="Digest of the evaluated adapter; None for the base."
    )
    partial: bool = Field(default=False, description="Whether the run that trained the checkpoint was stopped at it.")
    num_tasks: int
    mean_reward: float
    std_reward: float
    min_reward: float
    max_reward: float
    pass_rate: float
    pass_rate_ci95: Interval
    pass_threshold: float
    parts: dict[str, float]
    truncated: int
    failed: int
    settings: dict[str, Any]
    settings_hash: str
    duration_s: float
    per_task: list[ItemResult]


class LiftSide(Result):
    """One side of a comparison."""

    pass_rate: float
    pass_rate_ci95: Interval
    mean_reward: float
    parts: dict[str, float] = {}


class PartLift(Result):
    """Paired difference of one reward part."""

    baseline: float
    policy: float
    lift: float
    ci95: Interval
    p_value: float


class LiftNumbers(Result):
    """Paired differences, policy minus baseline."""

    pass_rate: float
    ci95: Interval
    p_value: float
    test: str
    mean_reward: float
    mean_reward_ci95: Interval
    mean_reward_p_value: float
    parts: dict[str, PartLift]


class LiftResult(Result):
    """Whether the policy is better than the baseline, and how sure that is."""

    verdict: Verdict
    num_tasks: int
    baseline: LiftSide
    policy: LiftSide
    lift: LiftNumbers
    fixed: list[str]
    broken: list[str]
    smallest_detectable_lift: float
    min_effect: float
    settings_hash: str


class TrainingResult(Result):
    """How a training run ended. `digest` is over the adapter's tensors, equal exactly when they are."""

    job_id: str | None = None
    kind: Literal["sft", "rl", "d2l"]
    status: Literal["completed", "cancelled", "failed"]
    stop_reason: str | None = None
    checkpoint_dir: str
    partial: bool
    steps: int
    metrics: dict[str, float]
    digest: str
    initial_digest: str
    duration_s: float


class Issue(Result):
    """One reason against a launch (blocker) or one thing to know before it (warning)."""

    code: str
    field: str | None = None
    message: str
    hint: str | None = None


class Estimate(Result):
    """What a job needs. Counts are upper bounds; None means not estimated, and `basis` says why."""

    steps: int | None = Field(description="Optimizer steps; None when a dataset's size decides.")
    prompts: int = Field(description="Problems that completions are sampled for, evaluations included.")
    rollouts: int = Field(description="Sampled completions, evaluations included.")
    tokens: int = Field(description="Sampled tokens.")
    duration_s: dict[str, float] | None = None
    flops: float | None = None
    memory_gib: float | None = None
    cost_gbp: dict[str, float] | None = None
    cost_ceiling_gbp: float | None = None
    basis: str


class Statistics(Result):
    """What the planned evaluation can show."""

    smallest_detectable_lift: float | None = None
    useful_group_share: float | None = None


class Preview(Result):
    """What a job would do, and what stands against it. A preview launches nothing."""

    launchable: bool
    launched: Literal[False] = False
    plan_hash: str | None = Field(description="SHA-256 of the resolved config; None when there is no valid config.")
    config: dict[str, Any] = Field(description="The resolved config, or the request as given when it is faulty.")
    compute: dict[str, Any]
    estimate: Estimate | None
    statistics: Statistics
    fx: dict[str, Any] | None = None
    blockers: list[Issue]
    warnings: list[Issue]


class PipelineResult(Result):
    """How a pipeline ended. Stages that did not run are None; evaluations are without `per_task`."""

    job_id: str
    status: Literal["completed", "cancelled"]
    stop_reason: str | None = None
    checkpoint_dir: str
    preview: dict[str, Any] | None = None
    sft: dict[str, Any] | None = None
    rl: dict[str, Any] | None = None
    evaluations: dict[str, dict[str, Any]] = {}
    lift: dict[str, Any] | None = None
    rl_lift: dict[str, Any] | None = None
    report: dict[str, str] = {}
    mlflow_run_id: str | None = None
    duration_s: float
