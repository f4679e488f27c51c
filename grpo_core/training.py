"""The life of a training run: start, resume, step, checkpoint, stop, finish.

SFT and GRPO (and every loop to come) give it one function, `step`, and read as if nothing ever
failed; how a run continues after a crash, refuses a foreign folder or ends early is decided here, once.
"""

from __future__ import annotations

import json
import logging
import math
import platform
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from pydantic import BaseModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from grpo_core.checkpoints import CheckpointStore, Manifest, file_digest
from grpo_core.errors import CheckpointConflict, ConfigError, TrainingFailed
from grpo_core.policies.base import TrainablePolicy, tensors_digest
from grpo_core.progress import Monitor, Notice, StepEvent, StopNow, StopReason, raise_if_stopping
from grpo_core.results import TrainingResult

logger = logging.getLogger(__name__)

NO_SIGNAL_STEPS = 10
"""A run whose first steps give the optimizer nothing at all is ended after this many."""

_MAY_CHANGE = frozenset({"compute", "checkpoint_every", "log_every"})
_MAY_GROW = frozenset({"prompts", "examples"})


@dataclass(frozen=True)
class StepResult:
    """What one step gives back: its metrics, the tokens it processed, and samples to show."""

    metrics: dict[str, float]
    tokens: int
    completions: Sequence[Mapping[str, Any]] = ()


@dataclass
class _State:
    """What a checkpoint keeps beside weights and optimizer."""

    step: int = 0
    position: int = 0
    updates: int = 0
    num_tokens: int = 0
    metrics: dict[str, float] = field(default_factory=dict)


class TrainingRun:
    """One training run in one checkpoint folder.

    A run works through `items` (prompts, or examples of all epochs), `per_step` at a time. Where it
    stands is a number of items, so a finished run with a short last step extends without a gap.

    Use: `stored_result`, then build the policy, then `TrainingRun(...)`, then `execute(step)`.
    """

    def __init__(
        self,
        kind: Literal["sft", "rl", "d2l"],
        config: BaseModel,
        policy: TrainablePolicy,
        store: CheckpointStore,
        monitor: Monitor,
        items: int,
        per_step: int,
    ):
        self._kind: Literal["sft", "rl", "d2l"] = kind
        self._settings = config
        self._policy = policy
        self._store = store
        self._monitor = monitor
        self._items = items
        self._per_step = per_step
        self._started = time.monotonic()
        self._state = _State()
        self._saved_step: int | None = None
        parameters = policy.trainable_parameters()
        if not parameters:
            raise ConfigError(
                "the policy has no trainable parameters", field="policy", hint="check target modules and adapter"
            )
        self._names = list(parameters)
        self._parameters = list(parameters.values())
        self._lr: float = config.lr  # type: ignore[attr-defined]
        self._optimizer = torch.optim.AdamW(self._parameters, lr=self._lr, weight_decay=config.weight_decay)  # type: ignore[attr-defined]
        self._layout = _numeric_layout(policy, config)
        self._start()

    @property
    def fresh(self) -> bool:
        """Whether no step is done yet."""
        return self._state.step == 0

    @property
    def total(self) -> int:
        """Steps of the whole run."""
        return self._state.step + math.ceil((self._items - self._state.position) / self._per_step)

    def freeze_reference(self, reference: Literal["init", "base"]) -> None:
        """Fix what the KL refers to; the initial policy is read from the run's own first checkpoint."""
        with self._store.opened(0) as folder:
            self._policy.set_reference(reference, folder)

    def update(self, step: int) -> dict[str, float]:
        """One optimizer step on the gradients that stand in the parameters.

        Returns:
            ``grad_norm`` (before clipping) and ``lr``. A step without any gradient changes nothing: momentum
            and weight decay do not move a policy that learned nothing.

        Raises:
            TrainingFailed: the gradient is not finite.
        """
        settings: Any = self._settings
        lr = self._lr * min(1.0, step / settings.warmup_steps) if settings.warmup_steps else self._lr
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, settings.max_grad_norm))
        if not math.isfinite(norm):
            raise TrainingFailed(
                f"the gradient of step {step} is {norm}", hint="lower lr or temperature", code="NON_FINITE"
            )
        if norm > 0:
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
            self._state.updates += 1
        self._optimizer.zero_grad(set_to_none=True)
        return {"grad_norm": norm, "lr": lr}

    def execute(
        self, step: Callable[[int, range], StepResult], finish: Callable[[], dict[str, float]]
    ) -> TrainingResult:
        """Run the remaining steps, checkpoint, and end as completed or cancelled.

        Args:
            step: does one step, given its 1-based number and its items; may raise `StopNow` before its
                first update, which drops it.
            finish: last measurements of a complete run, as metrics; may raise `StopNow`.

        Raises:
            TrainingFailed: nothing was trained (code NO_SIGNAL), or a number was not finite.
        """
        state = self._state
        try:
            while state.position < self._items and not (state.step >= NO_SIGNAL_STEPS and state.updates == 0):
                raise_if_stopping(self._monitor)
                number = state.step + 1
                items = range(state.position, min(state.position + self._per_step, self._items))
                self._optimizer.zero_grad(set_to_none=True)
                outcome = step(number, items)
                state.step, state.position = number, items.stop
                state.num_tokens += outcome.tokens
                state.metrics = {**outcome.metrics, "num_tokens": float(state.num_tokens)}
                self._report(outcome)
                if number % self._settings.checkpoint_every == 0 or state.position == self._items:  # type: ignore[attr-defined]
                    self._save(partial=False)
            return self._finished(finish)
        except StopNow as stop:
            return self._stopped(stop.reason)

    def _report(self, outcome: StepResult) -> None:
        state = self._state
        if state.step % getattr(self._settings, "log_every", 1) == 0 or state.position == self._items:
            self._monitor.emit(StepEvent(self._kind, state.step, self.total, state.metrics, outcome.completions))

    def _start(self) -> None:
        latest = self._store.latest()
        if latest is None:
            self._save(partial=False)
            return
        self._refuse_other_layout(latest)
        with self._store.opened(latest.step) as folder:
            self._policy.restore(folder)
            self._load_optimizer(folder / "optimizer.safetensors")
            self._state = _State(**json.loads((folder / "state.json").read_text()))
        self._saved_step = latest.step
        if latest.step:
            self._monitor.emit(Notice("info", f"resuming {self._kind} after step {latest.step} of {self.total}"))

    def _refuse_other_layout(self, manifest: Manifest) -> None:
        differences = _differences(manifest.layout, self._layout)
        if differences and manifest.step:
            raise CheckpointConflict(
                f"{self._store.url} was written under another numeric layout: {differences}",
                field="checkpoint_dir",
                hint="continue where it began, or start a new folder from this one as initial checkpoint",
            )

    def _save(self, partial: bool) -> None:
        with tempfile.TemporaryDirectory(prefix="grpo-lab-") as temporary:
            folder = Path(temporary)
            self._policy.save(folder)
            self._save_optimizer(folder / "optimizer.safetensors")
            (folder / "state.json").write_text(json.dumps(self._state.__dict__, sort_keys=True))
            manifest = Manifest(
                step=self._state.step,
                kind=self._kind,
                partial=partial,
                config=comparable_config(self._settings),
                layout=self._layout,
                digest=tensors_digest(self._policy.trainable_parameters()),
                files={path.name: file_digest(path) for path in sorted(folder.iterdir())},
                parent=self._saved_step,
            )
            self._store.save(folder, manifest)
        self._saved_step = self._state.step

    def _stopped(self, reason: StopReason) -> TrainingResult:
        if self._saved_step == self._state.step:
            self._store.mark_partial(self._state.step)
        else:
            self._save(partial=True)
        return self._result("cancelled", partial=True, stop_reason=reason)

    def _finished(self, finish: Callable[[], dict[str, float]]) -> TrainingResult:
        unchanged = tensors_digest(self._policy.trainable_parameters()) == self._initial_digest()
        if unchanged or self._state.updates == 0:
            raise TrainingFailed(
                f"{self._kind} gave the optimizer no signal in {self._state.step} steps: the policy did not change",
                hint="rewards that never differ within a group teach nothing: start from an SFT checkpoint, "
                "make problems easier, or raise group_size or temperature",
                code="NO_SIGNAL",
            )
        self._state.metrics = {**self._state.metrics, **finish()}
        result = self._result("completed", partial=False, stop_reason=None)
        with tempfile.TemporaryDirectory(prefix="grpo-lab-") as temporary:
            self._policy.save(Path(temporary))
            self._store.finish(Path(temporary), {"config": comparable_config(self._settings), **result.document()})
        return result

    def _initial_digest(self) -> str:
        return self._store.manifests()[0].digest

    def _result(
        self, status: Literal["completed", "cancelled"], partial: bool, stop_reason: StopReason | None
    ) -> TrainingResult:
        return TrainingResult(
            kind=self._kind,
            status=status,
            stop_reason=stop_reason,
            checkpoint_dir=self._store.url,
            partial=partial,
            steps=self._state.step,
            metrics=self._state.metrics,
            digest=tensors_digest(self._policy.trainable_parameters()),
            initial_digest=self._initial_digest(),
            duration_s=time.monotonic() - self._started,
        )

    def _save_optimizer(self, path: Path) -> None:
        tensors: dict[str, Tensor] = {}
        for name, parameter in zip(self._names, self._parameters, strict=True):
            for key, value in self._optimizer.state.get(parameter, {}).items():
                tensors[f"{name}|{key}"] = value.detach().cpu().contiguous()
        save_file(tensors, path)

    def _load_optimizer(self, path: Path) -> None:
        for name, value in load_file(path).items():
            parameter_name, _, key = name.rpartition("|")
            parameter = self._parameters[self._names.index(parameter_name)]
            # AdamW keeps its step counter on the host, the moments beside the parameter
            self._optimizer.state[parameter][key] = value if key == "step" else value.to(parameter.device)


def stored_result(store: CheckpointStore, config: BaseModel) -> TrainingResult | None:
    """The result of a finished run with this config; None when there is work to do.

    Raises:
        CheckpointConflict: the folder belongs to another config; the message names the differences.
    """
    latest = store.latest()
    if latest is None:
        return None
    new, grown = comparable_config(config), False
    old = latest.config
    # With several epochs, more examples would change the order of those already seen.
    for name in (_MAY_GROW if new.get("epochs", 1) == 1 else set()) & old.keys() & new.keys():
        if new[name] is not None and old[name] is not None and new[name] > old[name]:
            grown = True
            old = {**old, name: new[name]}
    old = {name: new.get(name) if name in _MAY_CHANGE else value for name, value in old.items()}
    if differences := _differences(old, new):
        raise CheckpointConflict(
            f"{store.url} was trained with another configuration: {differences}",
            field="checkpoint_dir",
            hint="use the same values, or another folder",
        )
    document = store.result()
    if document is None:
        return None
    if grown:
        store.reopen()
        return None
    document.pop("config")
    return TrainingResult(**document)


def comparable_config(config: BaseModel) -> dict[str, Any]:
    """The config as a checkpoint records it: all but the folder that it is in."""
    return config.model_dump(mode="json", exclude={"checkpoint_dir"})


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    names = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    return ", ".join(f"{name} was {old.get(name)!r}, now {new.get(name)!r}" for name in names)


def _numeric_layout(policy: TrainablePolicy, config: BaseModel) -> dict[str, Any]:
    """What bit-exact continuation depends on beside the config."""
    base = policy.base
    return {
        "dtype": str(base.dtype).removeprefix("torch."),
        "device": base.device.type,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads() if base.device.type == "cpu" else None,
        "machine": platform.machine(),
        "micro_batch_tokens": getattr(config, "micro_batch_tokens", None),
    }
