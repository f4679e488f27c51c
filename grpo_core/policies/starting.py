"""Where a training run's policy comes from, and what tells that start from another.

A run that has begun stands on its own first checkpoint; before that it continues an existing adapter, or
begins with a fresh one.
"""

from __future__ import annotations

from grpo_core.checkpoints import CheckpointStore, policy_folder
from grpo_core.config import CommonConfig
from grpo_core.errors import ConfigError, NotFoundError
from grpo_core.families import weights_fingerprint
from grpo_core.models import BaseModel, weights_source
from grpo_core.policies.base import tensors_digest
from grpo_core.policies.peft_lora import PeftLoraPolicy, read_adapter_config, read_adapter_tensors


def input_digests(store: CheckpointStore, config: CommonConfig, init: str | None, init_field: str) -> dict[str, str]:
    """Digests of the base weights and of the initial adapter, which the config only names.

    A run that has begun needs its initial adapter no more: where that is gone, what was recorded stands.

    Raises:
        NotFoundError: the initial adapter is not there and the run has not begun.
    """
    digests = {"weights": weights_fingerprint(weights_source(config.family, config.model_dir))}
    if init is not None:
        try:
            with policy_folder(init, init_field) as folder:
                digests["initial adapter"] = tensors_digest(read_adapter_tensors(folder))
        except NotFoundError:
            if (begun := store.latest()) is None:
                raise
            digests["initial adapter"] = begun.inputs["initial adapter"]
    return digests


def start_policy(
    base: BaseModel,
    store: CheckpointStore,
    init: str | None,
    init_field: str,
    rank: int | None,
    alpha: int | None,
    seed: int,
) -> PeftLoraPolicy:
    """The policy that a training run starts from: its own first checkpoint, an existing adapter, or a fresh one.

    Args:
        init: URL of the adapter to continue, named by the config's field `init_field`.

    Raises:
        ConfigError: `rank` or `alpha` differ from the existing adapter's.
    """
    if store.latest() is not None:
        with store.opened(0) as folder:
            return PeftLoraPolicy.load(base, folder)
    if init is None:
        return PeftLoraPolicy.create(base, rank, alpha, seed)
    with policy_folder(init, init_field) as folder:
        config = read_adapter_config(folder)
        for field, wanted, stored in (("lora_rank", rank, config["r"]), ("lora_alpha", alpha, config["lora_alpha"])):
            if wanted is not None and wanted != stored:
                hint = f"leave it out to take the adapter's, or leave {init_field} out"
                raise ConfigError(f"{wanted} differs from the initial adapter's {stored}", field=field, hint=hint)
        return PeftLoraPolicy.load(base, folder)
