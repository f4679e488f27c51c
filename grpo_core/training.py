"""The life of a training run: start, resume, step, validate, checkpoint, stop, finish.

SFT and GRPO (and every loop to come) give it one function, `step`, and read as if nothing ever
failed; how a run continues after a crash, refuses a foreign folder or ends early is decided here, once.
"""

from __future__ import annotations

import json
import logging
import math
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from grpo_core.checkpoints import CheckpointStore, Manifest
from grpo_core.continuation import LoopConfig, comparable, differences
from grpo_core.errors import CheckpointConflict, ConfigError, TrainingFailed
from grpo_core.keeping import Keeper, Retention
from grpo_core.models import numeric_layout
from grpo_core.policies.base import TrainablePolicy, tensors_digest
from grpo_core.progress import Begun, Monitor, Notice, StepEvent, StopNow, StopReason, raise_if_stopping
from grpo_core.results import TrainingResult
from grpo_core.scratch import drop, staged

logger = logging.getLogger(__name__)

Kind = Literal["sft", "rl", "d2l"]
Metrics = dict[str, float]

NO_SIGNAL_STEPS = 10
"""A run whose first steps give the optimizer nothing at all is ended after this many."""

LONG_STEP_S = 20.0
"""A step of more is warned about: Prefect kills a process 30 s after its own cancellation."""


@dataclass(frozen=True)
class StepResult:
    """What one step gives back: its metrics, the tokens it processed, and samples to show."""

    metrics: Metrics
    tokens: int
    completions: Sequence[Mapping[str, Any]] = ()


@dataclass
class _State:
    """What a checkpoint keeps beside weights and optimizer.

    Attributes:
        position: items done. updates: optimizer steps that had a gradient.
        validated: newest step whose policy was validated, -1 for none.
    """

    step: int = 0
    position: int = 0
    updates: int = 0
    num_tokens: int = 0
    validated: int = -1
    metrics: Metrics = field(default_factory=dict)


class TrainingRun:
    """One training run in one checkpoint folder.

    A run works through `items` (prompts, or examples of all epochs), `per_step` at a time. Where it
    stands is a number of items, so a finished run with a short last step extends without a gap.

    Use: `continuation.stored_result`, then build the policy, then ``with TrainingRun(...) as run: run.execute(step)``.
    """

    def __init__(
        self,
        kind: Kind,
        config: LoopConfig,
        policy: TrainablePolicy,
        store: CheckpointStore,
        monitor: Monitor,
        *,
        items: int,
        per_step: int,
        inputs: dict[str, str],
        micro_batch: int,
        log_every: int = 1,
    ):
        """Make a run of `items` in steps of `per_step`; nothing is read or written yet.

        Args:
            inputs: digests of what the config only names (see `Manifest.inputs`).
            micro_batch: what bounds one forward pass, as a part of the numeric layout.
        """
        parameters = policy.trainable_parameters()
        if not parameters:
            hint = "check target modules and adapter"
            raise ConfigError("the policy has no trainable parameters", field="policy", hint=hint)
        assert config.lr is not None, "the config must be resolved"
        self._kind: Kind = kind
        self._config = config
        self._policy = policy
        self._store = store
        self._keeper = Keeper(store, Retention(config.keep_last, config.keep_every), self._warn)
        self._monitor = monitor
        self._items = items
        self._per_step = per_step
        self._inputs = inputs
        self._log_every = log_every
        self._lr = config.lr
        self._names = list(parameters)
        self._parameters = list(parameters.values())
        self._optimizer = torch.optim.AdamW(self._parameters, lr=config.lr, weight_decay=config.weight_decay)
        self._layout = {**numeric_layout(policy.base), "micro_batch": micro_batch}
        self._state = _State()
        self._saved_step: int | None = None
        self._run_id = uuid.uuid4().hex
        self._initial_digest = ""
        self._history: list[str] = []
        self._started = time.monotonic()
        self._warned_of_length = False

    def __enter__(self) -> Self:
        """Take up the newest checkpoint, or keep the initial policy as the first one.

        Raises:
            CheckpointConflict: it was written under another numeric layout, or another process writes to the folder.
        """
        self._keeper.__enter__()
        try:
            self._begin()
        except BaseException as error:
            self._keeper.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._keeper.__exit__(kind, error, trace)

    def _begin(self) -> None:
        latest = self._store.latest()
        if latest is None:
            self._save(partial=False)
            self._keeper.join()
        else:
            self._resume(latest)
        self._initial_digest = self._store.complete(0).digest
        self._monitor.emit(Begun(self._kind, self._run_id, [json.loads(row) for row in self._history]))

    def _resume(self, latest: Manifest) -> None:
        if changed := differences(latest.layout, self._layout):
            raise CheckpointConflict(
                f"{self._store.url} was written under another numeric layout: {changed}",
                field="checkpoint_dir",
                hint="continue where it began, or start a new folder from this one as initial checkpoint",
            )
        with self._store.opened(latest.step) as folder:
            self._policy.restore(folder)
            self._load_optimizer(folder / "optimizer.safetensors")
            self._state = _State(**json.loads((folder / "state.json").read_text()))
            self._history = (folder / "metrics.jsonl").read_text().splitlines()
        self._store.reopen()  # it may have been finished and is being extended, or was killed while this was done
        self._keeper.tidy()
        self._saved_step, self._run_id = latest.step, latest.run_id
        if latest.step:
            self._monitor.emit(Notice("info", f"resuming {self._kind} after step {latest.step} of {self._total}"))

    def freeze_reference(self, reference: Literal["init", "base"]) -> None:
        """Fix what the KL refers to; the initial policy is read from the run's own first checkpoint."""
        with self._store.opened(0) as folder:
            self._policy.set_reference(reference, folder)

    def update(self, step: int) -> Metrics:
        """One optimizer step on the gradients that stand in the parameters.

        Returns:
            ``grad_norm`` (before clipping) and ``lr``. A step without any gradient changes nothing: momentum
            and weight decay do not move a policy that learned nothing.

        Raises:
            TrainingFailed: the gradient is not finite.
        """
        warmup = self._config.warmup_steps
        lr = self._lr * min(1.0, step / warmup) if warmup else self._lr
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, self._config.max_grad_norm))
        if not math.isfinite(norm):
            message, hint = f"the gradient of step {step} is {norm}", "lower lr or temperature"
            raise TrainingFailed(message, hint=hint, code="NON_FINITE")
        if norm > 0:
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
            self._state.updates += 1
        self._optimizer.zero_grad(set_to_none=True)
        return {"grad_norm": norm, "lr": lr}

    def execute(
        self,
        step: Callable[[int, range], StepResult],
        validate: Callable[[], Metrics] | None = None,
        validate_every: int = 0,
    ) -> TrainingResult:
        """Run the remaining steps, validate, checkpoint, and end as completed or cancelled.

        Args:
            step: does one step, given its 1-based number and its items. It may raise `StopNow` until its
                first update, which drops it; after that it must go through.
            validate: measures the policy; may raise `StopNow`. Called at the end and, with `validate_every`,
                before the first step and after each so many steps.

        Raises:
            TrainingFailed: nothing was trained (code NO_SIGNAL), or a number was not finite.
        """
        state, config = self._state, self._config
        try:
            while True:
                over = self._over
                due = over or (validate_every > 0 and state.step % validate_every == 0)
                if validate and due and state.validated != state.step and not (over and self._unchanged):
                    self._record(validate())
                    state.validated = state.step
                if over:
                    return self._finished()
                if state.step % config.checkpoint_every == 0:
                    self._save(partial=False)
                raise_if_stopping(self._monitor)
                number, items = state.step + 1, self._next_items
                self._optimizer.zero_grad(set_to_none=True)
                began = time.monotonic()
                outcome = step(number, items)
                self._warn_of_length(time.monotonic() - began)
                state.step, state.position = number, items.stop
                state.num_tokens += outcome.tokens
                state.metrics = {**outcome.metrics, "num_tokens": float(state.num_tokens)}
                if number % self._log_every == 0 or self._over:
                    self._emit(state.metrics, outcome.completions)
        except StopNow as stop:
            return self._stopped(stop.reason)

    @property
    def _total(self) -> int:
        return self._state.step + math.ceil((self._items - self._state.position) / self._per_step)

    @property
    def _next_items(self) -> range:
        return range(self._state.position, min(self._state.position + self._per_step, self._items))

    @property
    def _over(self) -> bool:
        """Whether all items are done, or so many steps gave no signal that none is to be expected."""
        state = self._state
        return state.position >= self._items or (state.step >= NO_SIGNAL_STEPS and state.updates == 0)

    @property
    def _unchanged(self) -> bool:
        return self._state.updates == 0 or self._digest() == self._initial_digest

    def _digest(self) -> str:
        return tensors_digest(self._policy.trainable_parameters())

    def _record(self, validation: Metrics) -> None:
        self._state.metrics = {**self._state.metrics, **validation}
        self._emit(validation, ())

    def _warn(self, message: str) -> None:
        self._monitor.emit(Notice("warning", message))

    def _warn_of_length(self, seconds: float) -> None:
        if seconds > LONG_STEP_S and not self._warned_of_length:
            self._warned_of_length = True
            self._warn(
                f"a step takes {seconds:.0f} s: Prefect's own cancel button kills a job after 30 s, and with it what "
                "was not saved; `lab jobs cancel` waits, and checkpoint_every bounds the loss"
            )

    def _emit(self, metrics: Metrics, completions: Sequence[Mapping[str, Any]]) -> None:
        self._history.append(json.dumps({"step": self._state.step, **metrics}))
        self._monitor.emit(StepEvent(self._kind, self._state.step, self._total, metrics, completions))

    def _save(self, partial: bool) -> None:
        """Keep the state of the last finished step; where it is kept already, only say whether the run stopped."""
        state = self._state
        if self._saved_step == state.step:
            self._keeper.mark(state.step, partial)
            return
        with staged() as folder:
            self._policy.save(folder)
            self._save_optimizer(folder / "optimizer.safetensors")
            (folder / "state.json").write_text(json.dumps(asdict(state), sort_keys=True))
            (folder / "metrics.jsonl").write_text("".join(f"{row}\n" for row in self._history))
        validation = state.metrics if state.validated == state.step else {}
        manifest = Manifest(
            step=state.step,
            kind=self._kind,
            partial=partial,
            config=comparable(self._config),
            layout=self._layout,
            digest=self._digest(),
            files={},
            parent=self._saved_step,
            inputs=self._inputs,
            run_id=self._run_id,
            validation={name: value for name, value in validation.items() if name.startswith("eval/")},
        )
        self._keeper.keep(folder, manifest)
        self._saved_step = state.step

    def _stopped(self, reason: StopReason) -> TrainingResult:
        self._save(partial=True)
        self._keeper.join()
        return self._result("cancelled", reason)

    def _finished(self) -> TrainingResult:
        if self._unchanged:
            self._save(partial=True)
            raise TrainingFailed(
                f"{self._kind} gave the optimizer no signal in {self._state.step} steps: the policy did not change",
                hint="rewards that never differ within a group teach nothing: start from an SFT checkpoint, "
                "make problems easier, or raise group_size or temperature",
                code="NO_SIGNAL",
            )
        self._save(partial=False)
        result = self._result("completed", None)
        with staged() as folder:
            self._policy.save(folder)
        try:
            self._keeper.finish(folder, result.document())
        finally:
            drop(folder)
        return result

    def _result(self, status: Literal["completed", "cancelled"], stop_reason: StopReason | None) -> TrainingResult:
        return TrainingResult(
            kind=self._kind,
            status=status,
            stop_reason=stop_reason,
            checkpoint_dir=self._store.url,
            partial=status != "completed",
            steps=self._state.step,
            metrics=self._state.metrics,
            digest=self._digest(),
            initial_digest=self._initial_digest,
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
