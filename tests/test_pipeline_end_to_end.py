"""A whole pipeline with nothing replaced: flow, tasks and core, on a tiny random model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows.jobs import outcome
from flows.pipeline import pipeline
from grpo_core.config import PipelineConfig
from grpo_core.progress import Event, StepEvent, StopReason
from tasks.monitoring import watching

RL_STEPS = 4


class Watcher:
    """Hears the trained steps of each stage; wants a stop once RL has done `stop_after` of them."""

    def __init__(self, stop_after: int | None = None):
        self.trained: dict[str, list[int]] = {"sft": [], "rl": []}
        self.evaluated: set[str] = set()
        self._stop_after = stop_after

    def emit(self, event: Event) -> None:
        if isinstance(event, StepEvent) and event.stage in self.trained and "loss" in event.metrics:
            self.trained[event.stage].append(event.step)
        elif isinstance(event, StepEvent) and event.stage.startswith("eval-"):
            self.evaluated.add(event.stage)

    def stop_requested(self) -> StopReason | None:
        return StopReason.CANCELLED if len(self.trained["rl"]) == self._stop_after else None


@pytest.fixture
def run(
    prefect_harness: None, tmp_path: Path, tiny_model_dir: str, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., dict[str, Any]]:
    """Runs the pipeline in a named folder, watched."""
    monkeypatch.setenv("LAB_HOME", str(tmp_path / "lab"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    fields: dict[str, Any] = {
        "family": "smollm2-135m",
        "model_dir": tiny_model_dir,
        "environment": "letters",
        "device": "cpu",
        "dtype": "float32",
        "sft": {"examples": 8, "examples_per_step": 4, "eval_examples": 2, "lora_rank": 4, "lr": 1e-2},
        "rl": {"prompts": 2 * RL_STEPS, "prompts_per_step": 2, "group_size": 4, "lr": 1e-2, "checkpoint_every": 3},
        "eval": {"num_tasks": 4},
    }

    def in_folder(name: str, watcher: Watcher) -> dict[str, Any]:
        with watching(watcher):
            state = pipeline(
                PipelineConfig.parse({**fields, "checkpoint_dir": str(tmp_path / name)}), return_state=True
            )
        return outcome(state)

    return in_folder


def test_a_pipeline_repeats_nothing_and_continues_exactly(run: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    whole = run("whole", first := Watcher())
    assert whole["status"] == "completed"
    # 8 examples, 4 a step; 8 prompts, 2 a step.
    assert first.trained == {"sft": [1, 2], "rl": [1, 2, 3, 4]}
    assert first.evaluated == {"eval-base", "eval-warm_start", "eval-policy"}
    assert whole["sft"]["digest"] == whole["rl"]["initial_digest"] != whole["rl"]["digest"]
    assert whole["evaluations"]["policy"]["checkpoint_digest"] == whole["rl"]["digest"]
    assert Path(whole["checkpoint_dir"], "report", "lift.md").exists()

    again = run("whole", second := Watcher())
    assert (second.trained, second.evaluated) == ({"sft": [], "rl": []}, set())
    assert [again[stage]["digest"] for stage in ("sft", "rl")] == [whole[stage]["digest"] for stage in ("sft", "rl")]
    assert again["lift"] == whole["lift"]
    assert again["job_id"] != whole["job_id"]

    # Step 2 is no step of a regular checkpoint: the stop itself saves it.
    stopped = run("halves", Watcher(stop_after=2))
    assert (stopped["status"], stopped["sft"]["status"], stopped["evaluations"]) == ("cancelled", "completed", {})
    assert (stopped["rl"]["partial"], stopped["rl"]["steps"]) == (True, 2)
    continued = run("halves", third := Watcher())
    assert third.trained == {"sft": [], "rl": [3, 4]}
    assert continued["status"] == "completed"
    assert continued["rl"]["digest"] == whole["rl"]["digest"]
    assert continued["lift"] == whole["lift"]
