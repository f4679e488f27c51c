"""What the tests of the training loops share."""

from grpo_core.progress import Event, StepEvent, StopReason

FAMILY = {"llama": "smollm2-135m", "qwen3": "qwen3-0.6b", "mistral": "mistral-7b"}
"""The family that a tiny model of an architecture stands in for."""


class Recorder:
    """Hears everything; wants a stop once `stop_after` steps were heard, or at the `stop_at_ask`-th question."""

    def __init__(self, stop_after: int | None = None, stop_at_ask: int | None = None):
        self.steps: list[StepEvent] = []
        self.asked = 0
        self._stop_after, self._stop_at_ask = stop_after, stop_at_ask

    def emit(self, event: Event) -> None:
        if isinstance(event, StepEvent) and event.stage != "eval":
            self.steps.append(event)

    def stop_requested(self) -> StopReason | None:
        self.asked += 1
        heard = self._stop_after is not None and len(self.steps) >= self._stop_after
        asked = self._stop_at_ask is not None and self.asked >= self._stop_at_ask
        return StopReason.CANCELLED if heard or asked else None

    def series(self, name: str) -> list[float]:
        return [event.metrics[name] for event in self.steps if name in event.metrics]
