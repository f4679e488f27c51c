"""What the tests of tracking share: runs without a clock, their steps and points, and an end of their process."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from typing import TypeVar

from mlflow.tracking import MlflowClient

from grpo_core.progress import StepEvent
from tasks import tracking

NEVER = 3600.0

T = TypeVar("T")


def open_run(name: str, job: str, **fields: object) -> tracking.TrackedRun:
    defaults = {"params": {}, "tags": {}, "deliver_every_s": NEVER}
    return tracking.open_run(name, job_id=job, **{**defaults, **fields})  # type: ignore[arg-type]


def step(number: int, **metrics: float) -> StepEvent:
    completions = [{"problem": f"p{number}", "completion": "7"}]
    return StepEvent(
        "rl", number, 500, metrics or {"reward": number / 500, "loss": 1.0, "clip_ratio/low": 0.25}, completions
    )


def points(client: MlflowClient, run: tracking.TrackedRun, name: str) -> list[tuple[int, float]]:
    assert run.id is not None
    return sorted((point.step, point.value) for point in client.get_metric_history(run.id, name))


def gone(*_: object, **__: object) -> None:
    raise ConnectionError("gone")


def wait_for(condition: Callable[[], T], within_s: float = 20.0) -> T:
    """What the condition gives, once it is true. A thread or process needs a moment, on a busy machine a long one."""
    ends = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < ends, "it did not come about"
        time.sleep(0.02)
    return found


def dies(run: tracking.TrackedRun) -> None:
    """Let the run's process be one that has ended, as its journal tells it."""
    header, *rest = run._journal.path.read_text().splitlines(keepends=True)
    run._journal.path.write_text(json.dumps({**json.loads(header), "process": ended_process()}) + "\n" + "".join(rest))


@cache
def ended_process() -> dict[str, object]:
    name = "import json; from grpo_core.processes import Process; print(json.dumps(vars(Process.this())))"
    return json.loads(subprocess.run([sys.executable, "-c", name], capture_output=True, check=True).stdout)
