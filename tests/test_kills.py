"""Jobs killed at random moments and started again: every one ends as if it had never been interrupted."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from loops import never_without_a_checkpoint
from mlflow.tracking import MlflowClient

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent


def start(
    job: str, config: dict[str, Any], kill_after_s: float | None = None, **environment: str
) -> list[dict[str, Any]]:
    """Run a job in a process of its own; what it printed, whether it was killed or not."""
    process = subprocess.run(
        [sys.executable, str(HERE / "doomed.py"), job],
        input=json.dumps({"config": config, "kill_after_s": kill_after_s}),
        env={**os.environ, "PYTHONPATH": f"{HERE}:{HERE.parent}", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    killed = process.returncode == -signal.SIGKILL
    assert killed or process.returncode == 0, process.stderr[-3000:]
    return [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]


@pytest.fixture
def fields(tiny_model_dir: str) -> dict[str, Any]:
    return {
        "family": "smollm2-135m",
        "model_dir": tiny_model_dir,
        "environment": "letters",
        "device": "cpu",
        "dtype": "float32",
        "lr": 1e-2,
    }


def killed_again_and_again(job: str, config: dict[str, Any], folder: Path, kills: int, seed: int) -> None:
    """Run the job whole, then with so many kills over as many runs as they need, and compare."""
    whole = start(job, {**config, "checkpoint_dir": str(folder / "whole")})[-1]["result"]
    assert whole["digest"] != whole["initial_digest"]
    moments = random.Random(seed)
    done, run = 0, 0
    while done < kills:
        run += 1
        place = str(folder / f"run-{run}")
        resumed = False
        with never_without_a_checkpoint(place):
            while True:
                # a step takes about 0.05 s, of which a third is spent on its checkpoint
                after_s = moments.uniform(0, 0.4) if done < kills else None
                said = start(job, {**config, "checkpoint_dir": place}, after_s)
                if resumed:
                    assert said[0]["after"] > 0
                if "result" in said[-1]:
                    assert said[-1]["result"]["digest"] == whole["digest"]
                    break
                done, resumed = done + 1, True


def test_sft_killed_at_random_moments(fields: dict[str, Any], tmp_path: Path) -> None:
    config = {**fields, "examples": 80, "examples_per_step": 4, "eval_examples": 2, "lora_rank": 4}
    killed_again_and_again("sft", {**config, "checkpoint_every": 1}, tmp_path, kills=8, seed=1)


def test_grpo_killed_at_random_moments(fields: dict[str, Any], tmp_path: Path) -> None:
    sft = {**fields, "examples": 8, "examples_per_step": 4, "eval_examples": 0, "lora_rank": 4}
    start("sft", {**sft, "checkpoint_dir": str(tmp_path / "sft")})
    config = {**fields, "policy": "peft-lora", "init_checkpoint_dir": str(tmp_path / "sft")}
    config |= {
        "prompts": 24,
        "prompts_per_step": 2,
        "group_size": 4,
        "kl_beta": 0.1,
        "eval_every": 4,
        "eval_prompts": 2,
    }
    config |= {"updates_per_rollout": 2, "resample_zero_variance": 1, "checkpoint_every": 1, "keep_last": 1}
    killed_again_and_again("rl", config, tmp_path, kills=8, seed=2)


def test_pipeline_killed_at_random_moments_leaves_the_same_series(
    fields: dict[str, Any], tmp_path: Path, prefect_harness: None
) -> None:
    from prefect.settings import PREFECT_API_URL

    environment = {"PREFECT_API_URL": str(PREFECT_API_URL.value()), "LAB_HOME": str(tmp_path / "lab")}
    lr = {"lr": fields.pop("lr")}
    config = {
        **fields,
        "sft": {
            "examples": 64,
            "examples_per_step": 4,
            "eval_examples": 2,
            "lora_rank": 4,
            "checkpoint_every": 2,
            **lr,
        },
        "rl": {"prompts": 48, "prompts_per_step": 2, "group_size": 4, "kl_beta": 0.1, "checkpoint_every": 3, **lr},
        "eval": {"num_tasks": 4},
    }
    moments = random.Random(3)
    results, series = {}, {}
    for name, kills in (("whole", 0), ("killed", 4)):
        store = f"sqlite:///{tmp_path / name}.db"
        place = str(tmp_path / name)
        done = 0
        while True:
            after_s = moments.uniform(0, 0.2) if done < kills else None
            said = start(
                "pipeline", {**config, "checkpoint_dir": place}, after_s, MLFLOW_TRACKING_URI=store, **environment
            )
            if "result" in said[-1]:
                break
            done += 1
        assert done >= min(kills, 2)  # a quick machine may be done before the others
        results[name] = said[-1]["result"]
        series[name] = all_points(MlflowClient(store))
    assert [results["killed"][stage]["digest"] for stage in ("sft", "rl")] == [
        results["whole"][stage]["digest"] for stage in ("sft", "rl")
    ]
    assert results["killed"]["lift"] == results["whole"]["lift"]
    assert series["killed"] == series["whole"]


def all_points(client: MlflowClient) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Steps and values of every metric of the training stages, but for those that measure time."""
    experiment = client.get_experiment_by_name("grpo-lab")
    assert experiment is not None
    points: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for run in client.search_runs([experiment.experiment_id]):
        stage = run.data.tags["stage"]
        # a kill before a stage's first checkpoint leaves a run without points
        if stage in ("sft", "rl") and run.data.metrics:
            assert stage not in points, "a run that was killed goes on in its MLflow run"
            points[stage] = {
                name: sorted((point.step, point.value) for point in client.get_metric_history(run.info.run_id, name))
                for name in run.data.metrics
                if not name.startswith("time/")
            }
    return points
