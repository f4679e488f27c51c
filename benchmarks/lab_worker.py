"""One GRPO run of this project, a step per command. See `link.py`; the spec is a GRPOConfig."""

from __future__ import annotations

import tempfile
import time

from link import Link, peak_memory_gib

from grpo_core.chat import Chat
from grpo_core.config import GRPOConfig
from grpo_core.grpo import train_grpo
from grpo_core.models import BaseModel
from grpo_core.progress import Event, StepEvent


class Stepper:
    """A monitor that answers after each step, or after the validation that follows it, and waits for a command."""

    def __init__(self, link: Link, eval_every: int):
        self._link = link
        self._eval_every = eval_every
        self._tokens = 0.0
        self._answer: dict[str, float] = {}
        self._started = time.monotonic()

    def emit(self, event: Event) -> None:
        if not isinstance(event, StepEvent) or event.stage != "rl":
            return
        if "eval/pass_rate" in event.metrics:
            self._next({**self._answer, "pass_rate": event.metrics["eval/pass_rate"]})
            return
        seconds = time.monotonic() - self._started
        metrics = event.metrics
        split = {name: metrics.get(f"time/{name}", 0.0) for name in ("rollout", "reference", "train")}
        self._answer = {
            "seconds": seconds,
            **split,
            "other": seconds - sum(split.values()),
            "tokens": metrics["num_tokens"] - self._tokens,
            "reward_std": metrics["reward_std"],
            "grad_norm": metrics["grad_norm"],
            "peak_memory_gib": peak_memory_gib(),
        }
        self._tokens = metrics["num_tokens"]
        if not (self._eval_every and event.step % self._eval_every == 0):
            self._next(self._answer)

    def stop_requested(self) -> None:
        return None

    def _next(self, answer: dict[str, float]) -> None:
        self._link.answer(**answer)
        self._link.wait()
        self._started = time.monotonic()


def never_stop() -> None:
    """Let completions run to their full length, as min_new_tokens does in TRL: equal work on both sides."""
    original = Chat.__init__

    def patched(self: Chat, base: BaseModel) -> None:
        original(self, base)
        self.stop_ids = frozenset()

    Chat.__init__ = patched


def main() -> None:
    link = Link()
    with tempfile.TemporaryDirectory(prefix="grpo-bench-") as folder:
        config = GRPOConfig.parse({**link.spec["config"], "checkpoint_dir": folder, "checkpoint_every": 10**6})
        if link.spec["exact_length"]:
            never_stop()
        stepper = Stepper(link, config.eval_every)
        if not config.eval_every:  # otherwise the validation before the first step answers
            link.answer(ready=True)
            link.wait()  # the first step's seconds hold the loading of the model: it is a warm-up
        train_grpo(config, stepper)


if __name__ == "__main__":
    main()
