"""Jobs killed at random moments and in chosen places: started again, every one ends as if never interrupted."""

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
from loops import never_without_a_checkpoint, verified_steps
from mlflow.tracking import MlflowClient

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent


def start(
    job: str,
    config: dict[str, Any],
    kill_after_s: float | None = None,
    kill_at: dict[str, Any] | None = None,
    **environment: str,
) -> list[dict[str, Any]]:
    """Run a job in a process of its own; what it printed, whether it was killed or not."""
    process = subprocess.run(
        [sys.executable, str(HERE / "doomed.py"), job],
        input=json.dumps({"config": config, "kill_after_s": kill_after_s, "kill_at": kill_at}),
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
                if resumed:  # one that was killed when its result was stored begins no more
                    assert said[0].get("after", 1) > 0
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


def test_evaluation_killed_at_random_moments(fields: dict[str, Any], tmp_path: Path) -> None:
    del fields["lr"]
    config = {**fields, "num_tasks": 640, "temperature": 1.0, "dtype": "bfloat16"}  # 40 batches of about 0.02 s
    *batches, whole = start("eval", {**config, "output_dir": str(tmp_path / "whole")})
    assert batches == [{"batch": number} for number in range(1, 41)]
    config["output_dir"] = str(tmp_path / "killed")
    moments = random.Random(4)
    runs = [start("eval", config, after_s) for after_s in (0.0, moments.uniform(0, 0.1), moments.uniform(0, 0.1))]
    runs.append(start("eval", config))
    assert "batch" in runs[0][-1] and runs[-1][-1]["result"]["per_task"] == whole["result"]["per_task"]
    done = [said["batch"] for run in runs for said in run if "batch" in said]
    # none is done twice; one that was kept just before a kill may not have been said
    assert done == sorted(set(done)) and len(done) >= 40 - 3
    assert [path.name for path in (tmp_path / "killed").iterdir()] == ["evaluation.json"]


STORE, DISK = "grpo_core.checkpoints:CheckpointStore", "fsspec.implementations.local:LocalFileSystem"

# In which call, and after which step the job goes on. A checkpoint of SFT has five files; those of steps 0 and 1
# are whole when that of step 2 is uploaded, which is when 1 becomes expendable. An upload goes on beside training
# until the next is staged, so who is killed in staging step 3 may or may not have uploaded step 2.
PLACES = {
    "before the optimizer is staged": ({"call": "grpo_core.training:TrainingRun._save_optimizer", "nth": 4}, {1, 2}),
    "after the policy is staged": (
        {"call": "grpo_core.policies.peft_lora:PeftLoraPolicy.save", "nth": 4, "when": "after"},
        {1, 2},
    ),
    "between two files": ({"call": f"{STORE}._put", "nth": 13}, {1}),
    "within a file": ({"call": f"{DISK}.put_file", "nth": 12, "when": "half"}, {1}),
    "before the manifest": ({"call": f"{STORE}._write_json", "nth": 3}, {1}),
    "within the manifest": (
        {"call": "pathlib:Path.write_text", "nth": 3, "when": "half", "within": f"{STORE}._write_json"},
        {1},
    ),
    "before the manifest has its name": ({"call": "os:replace", "nth": 3, "within": f"{STORE}._write_json"}, {1}),
    "after the manifest": ({"call": f"{STORE}.save", "nth": 3, "when": "after"}, {2}),
    "before what is old is deleted": ({"call": f"{STORE}.remove", "nth": 1}, {2}),
    "when its manifest is deleted": ({"call": f"{DISK}.rm", "nth": 1}, {2}),
    "when half of it is deleted": ({"call": "os:unlink", "nth": 2, "within": f"{DISK}.rm"}, {2}),
    "between two files of the final policy": ({"call": f"{STORE}._put", "nth": 2, "within": f"{STORE}.finish"}, {6}),
    "before the result": ({"call": f"{STORE}._write_json", "nth": 1, "within": f"{STORE}.finish"}, {6}),
    "after the result": ({"call": f"{STORE}.finish", "nth": 1, "when": "after"}, {None}),
}
SIX_STEPS = {"examples": 24, "examples_per_step": 4, "eval_examples": 2, "lora_rank": 4, "checkpoint_every": 1}


@pytest.fixture(scope="module")
def six_steps(tiny_model_dir: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """Config of an SFT job, and the digest with which it ends if nothing happens."""
    config = {"family": "smollm2-135m", "model_dir": tiny_model_dir, "environment": "letters", "device": "cpu"}
    config |= {"dtype": "float32", "lr": 1e-2, **SIX_STEPS, "keep_last": 1}
    whole = start("sft", {**config, "checkpoint_dir": str(tmp_path_factory.mktemp("whole"))})[-1]["result"]
    assert whole["digest"] != whole["initial_digest"]
    return config, whole["digest"]


@pytest.mark.parametrize("place", PLACES)
def test_sft_killed_in_a_place_goes_on(place: str, six_steps: tuple[dict[str, Any], str], tmp_path: Path) -> None:
    config, digest = six_steps
    kill_at, begins = PLACES[place]
    config = {**config, "checkpoint_dir": str(tmp_path / "run")}
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    with never_without_a_checkpoint(config["checkpoint_dir"]):
        killed = start("sft", config, kill_at={"when": "before", **kill_at}, TMPDIR=str(temporary))
        assert "result" not in (killed or [{}])[-1]
        said = start("sft", config, TMPDIR=str(temporary))
    assert said[0].get("after") in begins
    assert said[-1]["result"]["digest"] == digest
    assert set(verified_steps(config["checkpoint_dir"])) >= {0, 6}
    if begins != {None}:  # what was staged goes when a run begins
        assert not list(temporary.glob("*/files"))
    assert not list((tmp_path / "run").glob("*/*.tmp"))


@pytest.mark.parametrize(("nth", "when"), [(1, "before"), (1, "after"), (3, "before")])
def test_sft_killed_when_it_is_extended_goes_on(
    nth: int, when: str, six_steps: tuple[dict[str, Any], str], tmp_path: Path
) -> None:
    config, digest = six_steps
    config = {**config, "checkpoint_dir": str(tmp_path / "run")}
    start("sft", {**config, "examples": 16})
    kill_at = {"call": f"{DISK}.rm_file", "nth": nth, "when": when, "within": f"{STORE}.reopen"}
    with never_without_a_checkpoint(config["checkpoint_dir"]):
        start("sft", config, kill_at=kill_at)
        said = start("sft", config, kill_at={"call": f"{STORE}.save", "nth": 1, "when": "before"})
        assert said[0]["after"] == 4
        assert not list((tmp_path / "run").glob("adapter*")), "a policy that is no longer the final one"
        said = start("sft", config)
    assert said[0]["after"] == 4
    assert said[-1]["result"]["digest"] == digest


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
