"""What the tests of the training loops share."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from grpo_core.checkpoints import CheckpointStore
from grpo_core.environments.base import Environment, Problem, Score, Split
from grpo_core.progress import Event, Notice, StepEvent, StopReason

FAMILY = {"llama": "smollm2-135m", "qwen3": "qwen3-0.6b", "mistral": "mistral-7b"}
"""The family that a tiny model of an architecture stands in for."""


class Recorder:
    """Hears everything; wants a stop once `stop_after` steps were heard, or at the `stop_at_ask`-th question."""

    def __init__(self, stop_after: int | None = None, stop_at_ask: int | None = None):
        self.steps: list[StepEvent] = []
        self.notices: list[Notice] = []
        self.asked = 0
        self._stop_after, self._stop_at_ask = stop_after, stop_at_ask

    def emit(self, event: Event) -> None:
        if isinstance(event, StepEvent) and event.stage != "eval":
            self.steps.append(event)
        elif isinstance(event, Notice):
            self.notices.append(event)

    def stop_requested(self) -> StopReason | None:
        self.asked += 1
        heard = self._stop_after is not None and len(self.steps) >= self._stop_after
        asked = self._stop_at_ask is not None and self.asked >= self._stop_at_ask
        return StopReason.CANCELLED if heard or asked else None

    def series(self, name: str) -> list[float]:
        return [event.metrics[name] for event in self.steps if name in event.metrics]


class Audience:
    """Hears an evaluation's batches and notices, and wants a stop once `stop_after` batches were heard."""

    def __init__(self, stop_after: int | None = None):
        self.batches: list[int] = []
        self.notices: list[Notice] = []
        self._stop_after = stop_after

    def emit(self, event: Event) -> None:
        if isinstance(event, StepEvent):
            self.batches.append(event.step)
        elif isinstance(event, Notice):
            self.notices.append(event)

    def stop_requested(self) -> StopReason | None:
        return StopReason.CANCELLED if len(self.batches) == self._stop_after else None


class Letters(Environment):
    """Rewards the share of lowercase letters, which differs even between random completions."""

    name = "letters"
    description = "Answer in lowercase letters."
    max_new_tokens = 6

    def problem(self, seed: int, split: Split, index: int, stream: str = "") -> Problem:
        place = f"{seed}-{split}-{stream}-{index}"
        return Problem(place, split, seed, index, None, f"Say ab{index}.", "ab")

    def score(self, problem: Problem, completion: str) -> Score:
        share = sum("a" <= letter <= "z" for letter in completion) / max(len(completion), 1)
        return Score(share, {"short": float(len(completion) < 3)})


@contextmanager
def never_without_a_checkpoint(folder: str) -> Iterator[None]:
    """Look all the time whether the folder, once it has had a checkpoint, has one that is whole."""
    store, over = CheckpointStore(folder), threading.Event()

    def times_without() -> int:
        had, without = False, 0
        while not over.wait(0.01):
            has = store.latest() is not None
            without += had and not has
            had |= has
        return without

    with ThreadPoolExecutor(max_workers=1) as pool:
        watched = pool.submit(times_without)
        try:
            yield
        finally:
            over.set()
    assert watched.result() == 0


def verified_steps(url: str) -> list[int]:
    """Steps of all checkpoints, once every byte of theirs was compared with its digest."""
    store = CheckpointStore(url)
    for step in store.steps():
        with store.opened(step):
            pass
    return store.steps()
