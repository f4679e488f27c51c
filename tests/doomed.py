"""Runs one job in a process that may kill itself: ``doomed.py JOB``, told by a JSON document on standard input.

    {"config": {...}, "kill_after_s": seconds after the third step or first batch that this process does, or null}

Prints the step after which a training goes on, or each batch that an evaluation does, and the job's result.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from typing import Any

from loops import Letters

from grpo_core import config as configs
from grpo_core.environments import registry
from grpo_core.progress import Begun, Event, StepEvent, StopReason


class Doom:
    """Kills this process some time after the third step, or an evaluation's first batch, that it hears.

    By the third step the first one's checkpoint is complete: its upload is joined before the second one's begins.
    """

    def __init__(self, job: str, after_s: float | None):
        self._evaluates = job == "eval"
        self._after_s = after_s
        self._heard = 0

    def emit(self, event: Event) -> None:
        if isinstance(event, Begun):
            print(
                json.dumps({"stage": event.stage, "after": max((int(row["step"]) for row in event.history), default=0)})
            )
            sys.stdout.flush()
        elif isinstance(event, StepEvent) and (self._evaluates or "loss" in event.metrics):
            if self._evaluates:
                print(json.dumps({"batch": event.step}), flush=True)
            self._heard += 1
            if self._heard == (1 if self._evaluates else 3) and self._after_s is not None:
                threading.Timer(self._after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()

    def stop_requested(self) -> StopReason | None:
        return None


def main() -> None:
    known = registry.environment_class
    lookup = lambda name: Letters if name == "letters" else known(name)  # noqa: E731
    registry.environment_class = lookup
    configs.environment_class = lookup
    job, told = sys.argv[1], json.load(sys.stdin)
    print(json.dumps({"result": run(job, told["config"], Doom(job, told["kill_after_s"]))}), flush=True)


def run(job: str, config: dict[str, Any], doom: Doom) -> dict[str, Any]:
    if job == "sft":
        from grpo_core.sft import train_sft

        return train_sft(configs.SFTConfig.parse(config), doom).document()
    if job == "rl":
        from grpo_core.grpo import train_grpo

        return train_grpo(configs.GRPOConfig.parse(config), doom).document()
    if job == "eval":
        from grpo_core.evaluation import evaluate

        output_dir = config.pop("output_dir")
        return evaluate(configs.EvalConfig.parse(config), output_dir, doom).document()
    from flows.pipeline import pipeline
    from grpo_core.compute import preview
    from tasks.monitoring import watching

    preview.environment_class = registry.environment_class
    with watching(doom):
        return pipeline(configs.PipelineConfig.parse(config))


if __name__ == "__main__":
    main()
