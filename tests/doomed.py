"""Runs one job in a process that may kill itself: ``doomed.py JOB``, told by a JSON document on standard input.

    {"config": {...}, "kill_after_s": seconds after the third step or first batch that this process does, or null,
     "kill_at": {"call": "module:name.of.function", "nth": 3, "when": "before", "within": "module:name"} or null}

``when`` the call is killed: before it, after it, or when it has written half ("half", for what writes a file);
``within`` another one that is going on, if that matters.

Prints the step after which a training goes on, or each batch that an evaluation does, and the job's result.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from grpo_core import config as configs
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
                threading.Timer(self._after_s, kill).start()

    def stop_requested(self) -> StopReason | None:
        return None


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def place(name: str) -> tuple[Any, str]:
    """Where ``module:Class.function`` is an attribute, and its name there."""
    module, _, path = name.partition(":")
    *owners, last = path.split(".")
    owner: Any = importlib.import_module(module)
    for each in owners:
        owner = getattr(owner, each)
    return owner, last


def doom_call(call: str, nth: int, when: str, within: str | None = None) -> None:
    """Kill this process at the nth call of a function, counted while `within` goes on, if that is given."""
    owner, name = place(call)
    original = getattr(owner, name)
    calls, going_on = 0, within is None

    def doomed(*values: Any, **named: Any) -> Any:
        nonlocal calls
        calls += going_on
        if not going_on or calls != nth:
            return original(*values, **named)
        if when == "after":
            original(*values, **named)
        elif when == "half" and name == "write_text":
            original(values[0], values[1][: len(values[1]) // 2])
        elif when == "half":
            content = Path(values[1]).read_bytes()
            Path(values[2]).write_bytes(content[: len(content) // 2])
        return kill()

    setattr(owner, name, doomed)
    if within is not None:
        around, outer = place(within)
        unwatched = getattr(around, outer)

        def watched(*values: Any, **named: Any) -> Any:
            nonlocal going_on
            going_on = True
            try:
                return unwatched(*values, **named)
            finally:
                going_on = False

        setattr(around, outer, watched)


def main() -> None:
    job, told = sys.argv[1], json.load(sys.stdin)
    if told.get("kill_at"):
        doom_call(**told["kill_at"])
    print(json.dumps({"result": run(job, told["config"], Doom(job, told.get("kill_after_s")))}), flush=True)


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
    from tasks.monitoring import watching

    with watching(doom):
        return pipeline(configs.PipelineConfig.parse(config))


if __name__ == "__main__":
    main()
