"""May this job go on in that folder? What a run may change when it is started again, and what it may not.

No torch here: admission asks before anything heavy is loaded. How a run continues is in `training.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo_core.checkpoints import CheckpointStore
from grpo_core.config import GRPOConfig, SFTConfig
from grpo_core.errors import CheckpointConflict
from grpo_core.results import TrainingResult

LoopConfig = SFTConfig | GRPOConfig

KINDS = {SFTConfig: "sft", GRPOConfig: "rl"}

_MAY_CHANGE = frozenset({"compute", "checkpoint_every", "keep_last", "keep_every", "log_every"})
_MAY_GROW = frozenset({"prompts", "examples"})


def refuse_other_run(store: CheckpointStore, config: LoopConfig, inputs: Mapping[str, str] | None = None) -> bool:
    """Refuse a folder that belongs to another run.

    Args:
        config: resolved.
        inputs: digests of what the config only names; None where they are not known yet.

    Returns:
        Whether the run that the folder holds was planned smaller than `config`.

    Raises:
        CheckpointConflict: another kind of job, another config, other inputs; the message names the differences.
    """
    latest = store.latest()
    if latest is None:
        return False
    if latest.kind != KINDS[type(config)]:
        message = f"{store.url} holds the checkpoints of a run of kind {latest.kind!r}, not {KINDS[type(config)]!r}"
        raise CheckpointConflict(message, field="checkpoint_dir", hint="use another folder")
    new, old = comparable(config), dict(latest.config)
    # With several epochs, more examples would change the order of those already seen.
    growing = _MAY_GROW & old.keys() & new.keys() if new.get("epochs", 1) == 1 else frozenset()
    grown = {name for name in growing if new[name] > old[name]}
    old |= {name: new[name] for name in grown | (_MAY_CHANGE & new.keys())}
    if changed := differences({**old, **(latest.inputs if inputs is not None else {})}, {**new, **(inputs or {})}):
        raise CheckpointConflict(
            f"{store.url} was trained otherwise: {changed}",
            field="checkpoint_dir",
            hint="use the same values, or another folder",
        )
    return bool(grown)


def stored_result(store: CheckpointStore, config: LoopConfig, inputs: Mapping[str, str]) -> TrainingResult | None:
    """The result of a finished run with this config and these inputs; None when there is work to do.

    Raises:
        CheckpointConflict: the folder belongs to another run.
    """
    grown = refuse_other_run(store, config, inputs)
    document = store.result()
    return TrainingResult(**document) if document is not None and not grown else None


def comparable(config: LoopConfig) -> dict[str, Any]:
    """The config as a checkpoint records it: all but the folder that it is in."""
    return config.model_dump(mode="json", exclude={"checkpoint_dir"})


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """What changed, as text: ``lr was 0.1, now 0.2``; empty when nothing did."""
    names = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    return ", ".join(f"{name} was {old.get(name)!r}, now {new.get(name)!r}" for name in names)
