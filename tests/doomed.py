"""Runs one job in a process that may kill itself: ``doomed.py JOB``, told by a JSON document on standard input.

    {"config": {...}, "kill_after_s": seconds after the third step that this process does, or null}

Prints the step after which it goes on, once that is known, and the job's result.
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
    """Kills this process some time after the third step that it hears.

    By then the first one's checkpoint is complete: its upload is joined before the second one's begins.
    """

    def __init__(self, after_s: float | None):
        self._after_s = after_s
        self._heard = 0

    def emit(self, event: Event) -> None:
        if isinstance(event, Begun):
            print(
                json.dumps({"stage": event.stage, "after": max((int(row["step"]) for row in event.history), default=0)})
            )
            sys.stdout.flush()
        elif isinstance(event, StepEvent) and event.stage in ("sft", "rl") and "loss" in event.metrics:
            self._heard += 1
            if self._heard == 3 and self._after_s is not None:
                threading.Timer(self._after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()

    def stop_requested(self) -> StopReason | None:
        return None


def main() -> None:
    known = registry.environment_class
    lookup = lambda name: Letters if name == "letters" else known(name)  # noqa: E731
    registry.environment_class = lookup
    configs.environment_class = lookup
    job, told = sys.argv[1], json.load(sys.stdin)
    print(json.dumps({"result": run(job, told["config"], Doom(told["kill_after_s"]))}), flush=True)


def run(job: str, config: dict[str, Any], doom: Doom) -> dict[str, Any]:
    if job == "sft":
        from grpo_core.sft import train_sft

        return train_sft(configs.SFTConfig.parse(config), doom).document()
    if job == "rl":
        from grpo_core.grpo import train_grpo

        return train_grpo(configs.GRPOConfig.parse(config), doom).document()
    from flows.pipeline import pipeline
    from grpo_core.compute import preview
    from tasks.monitoring import watching

    preview.environment_class = registry.environment_class
    with watching(doom):
        return pipeline(configs.PipelineConfig.parse(config))


if __name__ == "__main__":
    main()
