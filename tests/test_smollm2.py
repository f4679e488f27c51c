"""The whole pipeline on the real SmolLM2, smaller than `make run`: what comes out, and what the stores say of it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_core.config import EvalConfig, PipelineConfig
from grpo_core.environments.registry import make_environment
from grpo_core.evaluation import evaluate
from grpo_core.progress import Silent

pytestmark = pytest.mark.slow

OPTIONS = {"min_blocks": 1, "max_blocks": 1, "num_keys": 3}
REQUEST = {
    "family": "smollm2-135m",
    "environment_options": OPTIONS,
    "sft": {"examples": 48, "eval_examples": 8},
    "rl": {"prompts": 48, "eval_every": 6, "eval_prompts": 8, "kl_beta": 0.01},
    "eval": {"num_tasks": 60},
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    home = tmp_path_factory.mktemp("lab")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LAB_HOME", str(home))
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{home}/mlflow.db")
        yield home


@pytest.fixture(scope="module")
def result(home: Path, prefect_harness: None) -> dict[str, Any]:
    from flows.pipeline import pipeline

    return pipeline(PipelineConfig.parse(REQUEST))


def test_rl_makes_the_warm_start_better(result: dict[str, Any]) -> None:
    assert result["status"] == "completed"
    rates = {name: evaluation["pass_rate"] for name, evaluation in result["evaluations"].items()}
    print(rates)
    assert rates["base"] < rates["warm_start"] < rates["policy"]
    assert result["lift"]["verdict"] == result["rl_lift"]["verdict"] == "improved"
    assert set(result["report"]) == {"json", "markdown"}


def test_rl_began_where_sft_ended(result: dict[str, Any]) -> None:
    assert result["rl"]["initial_digest"] == result["sft"]["digest"] != result["rl"]["digest"]


def test_plain_peft_reproduces_the_policys_greedy_completions(result: dict[str, Any], home: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    request = {**REQUEST["eval"], "num_tasks": 10, "dtype": "float32", "policy": "peft-lora"}  # type: ignore[dict-item]
    common = {
        "family": "smollm2-135m",
        "environment_options": OPTIONS,
        "checkpoint_dir": result["rl"]["checkpoint_dir"],
    }
    ours = evaluate(EvalConfig.parse({**common, **request}), str(home / "fp32"), Silent())

    (weights,) = (home / "models").iterdir()
    tokenizer = AutoTokenizer.from_pretrained(weights)
    base = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32)
    policy = PeftModel.from_pretrained(base, result["rl"]["checkpoint_dir"]).eval()
    environment = make_environment("niah", OPTIONS)
    for row in ours.per_task:
        problem = environment.problem(0, "eval", row.index)
        message = {"role": "user", "content": f"{problem.document}\n\n{problem.question}"}
        prompt = tokenizer.apply_chat_template(
            [message], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        generated = policy.generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt["input_ids"].shape[1] :]
        assert tokenizer.decode(generated, skip_special_tokens=True) == row.completion


def test_prefect_knows_every_stage(result: dict[str, Any]) -> None:
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey, FlowRunFilter, FlowRunFilterId

    with get_client(sync_client=True) as client:
        runs = [run for run in client.read_flow_runs() if str(run.id).startswith(result["job_id"].rpartition("-")[2])]
        assert [run.state_type.value for run in runs if run.state_type] == ["COMPLETED"]
        mine = FlowRunFilter(id=FlowRunFilterId(any_=[runs[0].id]))
        stages = {run.name.rsplit("-", 1)[0]: run.state_type for run in client.read_task_runs(flow_run_filter=mine)}
        reports = client.read_artifacts(artifact_filter=ArtifactFilter(key=ArtifactFilterKey(like_="lift")))
    assert len(stages) >= 5 and {state.value for state in stages.values() if state} == {"COMPLETED"}
    assert any("pass rate" in str(report.data) for report in reports)


def test_mlflow_knows_every_metric_of_every_step(result: dict[str, Any]) -> None:
    from mlflow.tracking import MlflowClient

    client = MlflowClient()
    parent = client.get_run(result["mlflow_run_id"])
    assert parent.info.status == "FINISHED"
    children = client.search_runs(
        [parent.info.experiment_id], f"tags.`mlflow.parentRunId` = '{result['mlflow_run_id']}'"
    )
    stages = {run.data.tags["stage"]: run for run in children}
    assert {"sft", "rl"} < set(stages) and len(stages) == 5
    assert all(run.info.status == "FINISHED" for run in children)
    rl = stages["rl"].info.run_id
    for name in (
        *("loss", "reward", "kl", "entropy", "grad_norm", "clip_ratio/low", "clip_ratio/high", "lr", "num_tokens"),
        *("frac_reward_zero_std", "reward_std", "rewards/contains", "time/rollout", "time/train"),
        *("completions/mean_length", "completions/clipped_ratio"),
        *("sampling/logprob_difference_mean", "sampling/logprob_difference_max"),
    ):
        assert [point.step for point in client.get_metric_history(rl, name)] == list(range(1, 13)), name
    assert client.get_metric_history(rl, "kl")[0].value == 0.0  # a warm start begins at its own reference
    assert [point.step for point in client.get_metric_history(rl, "eval/reward")][:2] == [0, 6]
    completions = Path(client.download_artifacts(rl, "completions.jsonl")).read_text().splitlines()
    assert {json.loads(line)["step"] for line in completions} == set(range(1, 13))
    assert any("lift" in artifact.path for artifact in client.list_artifacts(result["mlflow_run_id"]))
