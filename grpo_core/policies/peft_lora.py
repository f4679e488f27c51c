"""The plain LoRA policy: one adapter for all problems, kept as a standard PEFT adapter directory.

Reads and writes PEFT's format; the arithmetic is in `adapters.py`. Adapters that PEFT can express
and this project does not compute (DoRA, trained embeddings, per-layer ranks, …) are refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from peft import LoraConfig
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from grpo_core.chat import Messages, document_and_question
from grpo_core.environments.base import Problem
from grpo_core.errors import CheckpointCorrupt, CheckpointError
from grpo_core.models import BaseModel
from grpo_core.policies.adapters import NO_ADAPTER, AdapterBatch, wrap_linear_layers

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
_PREFIX = "base_model.model."
_PLAIN_LORA = "use a plain LoRA adapter"

# What adapter_config.json may say without changing what a plain LoRA adapter computes. Any other field must be
# at PEFT's default, so that an option that this project does not know is refused and not ignored.
_HARMLESS = frozenset(
    {
        *("r", "lora_alpha", "target_modules", "peft_type", "task_type"),
        *("base_model_name_or_path", "revision", "inference_mode", "auto_mapping", "peft_version"),
        *("lora_dropout", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
        *("runtime_config", "megatron_config", "megatron_core", "qalora_group_size", "ensure_weight_tying"),
    }
)


# Initialisations that leave the base weights alone; PiSSA, OLoRA and their like change them.
_PLAIN_INIT = (True, False, "gaussian", "orthogonal", "eva")


class PeftLoraPolicy:
    """A base model and one trainable LoRA adapter with fp32 weights."""

    kind = "peft-lora"

    def __init__(self, base: BaseModel, rank: int, alpha: int, target_modules: Sequence[str]):
        self.base = base
        self.rank = rank
        self.alpha = alpha
        self.target_modules = tuple(target_modules)
        self._layers = wrap_linear_layers(base.model, self.target_modules)
        self._a: dict[str, Tensor] = {}
        self._b: dict[str, Tensor] = {}
        for name, layer in self._layers.items():
            self._a[name] = torch.zeros(rank, layer.in_features, device=base.device, requires_grad=True)
            self._b[name] = torch.zeros(layer.out_features, rank, device=base.device, requires_grad=True)
        self._reference = NO_ADAPTER

    @classmethod
    def create(cls, base: BaseModel, rank: int | None, alpha: int | None, seed: int) -> PeftLoraPolicy:
        """A fresh adapter that changes nothing yet: A is Kaiming-uniform as in PEFT, B is zero."""
        preset = base.family.lora
        policy = cls(base, rank or preset.rank, alpha or preset.alpha, preset.target_modules)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name in sorted(policy._a):
                a = policy._a[name]
                bound = 1 / math.sqrt(a.shape[1])  # kaiming_uniform_(a=sqrt(5)) over fan_in = d_in
                a.copy_(torch.empty(a.shape).uniform_(-bound, bound, generator=generator))
        return policy

    @classmethod
    def load(cls, base: BaseModel, folder: Path) -> PeftLoraPolicy:
        """An adapter from a local PEFT adapter directory.

        Raises:
            CheckpointError: not a PEFT LoRA adapter, or one that computes something else than plain LoRA.
        """
        config = read_adapter_config(folder)
        policy = cls(base, config["r"], config["lora_alpha"], config["target_modules"])
        policy.restore(folder)
        return policy

    def render(self, problem: Problem) -> Messages:
        """Document and question."""
        return document_and_question(problem)

    def adapters(self, problems: Sequence[Problem]) -> AdapterBatch:
        """The one adapter, without gradients."""
        return self.leaf_adapters(problems).detached()

    def leaf_adapters(self, problems: Sequence[Problem]) -> AdapterBatch:
        """The one adapter as leaves that share the parameters' memory."""
        return AdapterBatch(
            {name: a.detach().unsqueeze(0).requires_grad_() for name, a in self._a.items()},
            {name: b.detach().unsqueeze(0).requires_grad_() for name, b in self._b.items()},
            self.alpha / self.rank,
        )

    def backward(self, leaves: AdapterBatch) -> None:
        """Add the leaves' gradients to the parameters'."""
        for parameters, batch in ((self._a, leaves.a), (self._b, leaves.b)):
            for name, leaf in batch.items():
                if leaf.grad is not None:
                    parameter, gradient = parameters[name], leaf.grad[0]
                    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    def trainable_parameters(self) -> dict[str, Tensor]:
        """A and B of every layer under PEFT's names."""
        named = {}
        for name in self._layers:
            named[f"{_PREFIX}{name}.lora_A.weight"] = self._a[name]
            named[f"{_PREFIX}{name}.lora_B.weight"] = self._b[name]
        return named

    def set_reference(self, reference: Literal["init", "base"], initial: Path) -> None:
        """Choose what the KL refers to: the frozen adapter in the folder `initial`, or the bare model.

        A fresh adapter, whose B is zero, is the bare model too, and is not computed: a tenth of the reference's time.
        """
        stored = read_adapter_tensors(initial)
        fresh = not any(bool(tensor.any()) for name, tensor in stored.items() if name.endswith("lora_B.weight"))
        if reference == "base" or fresh:
            self._reference = NO_ADAPTER
            return
        frozen = {name: tensor.to(self.base.device).unsqueeze(0) for name, tensor in stored.items()}
        self._reference = AdapterBatch(
            {name: frozen[f"{_PREFIX}{name}.lora_A.weight"] for name in self._layers},
            {name: frozen[f"{_PREFIX}{name}.lora_B.weight"] for name in self._layers},
            self.alpha / self.rank,
        )

    def reference_adapters(self, problems: Sequence[Problem]) -> AdapterBatch:
        """The frozen reference adapter, or none."""
        return self._reference

    def save(self, folder: Path) -> None:
        """Write ``adapter_config.json`` and ``adapter_model.safetensors`` (fp32), as `peft` reads them."""
        config = LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,
            target_modules=sorted(self.target_modules),
            task_type="CAUSAL_LM",
            base_model_name_or_path=self.base.family.hub_id or self.base.family.name,
            inference_mode=True,
        )
        config.save_pretrained(str(folder))
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.trainable_parameters().items()}
        save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})

    def restore(self, folder: Path) -> None:
        """Take the weights of an adapter directory with the same layers and rank."""
        stored = read_adapter_tensors(folder)
        parameters = self.trainable_parameters()
        if set(stored) != set(parameters):
            odd = sorted(set(stored) ^ set(parameters))
            message = f"its tensors are not those of this model's layers, for example {odd[0]!r}"
            raise CheckpointError(message, hint="the adapter belongs to another model")
        with torch.no_grad():
            for name, parameter in parameters.items():
                if stored[name].shape != parameter.shape:
                    message = (
                        f"{folder}: {name} has shape {tuple(stored[name].shape)}, expected {tuple(parameter.shape)}"
                    )
                    raise CheckpointError(message, hint="the adapter belongs to another model")
                parameter.copy_(stored[name])


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """The checked ``adapter_config.json`` of a local PEFT adapter directory.

    Raises:
        CheckpointError: it is missing or broken, or asks for something this project does not compute.
    """
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise CheckpointError(
            f"there is no {CONFIG_FILE}", hint="give a PEFT adapter directory or a training run's folder"
        )
    try:
        config = json.loads(path.read_text())
        peft_type, rank, alpha, targets = (config[key] for key in ("peft_type", "r", "lora_alpha", "target_modules"))
    except (ValueError, KeyError, TypeError) as error:
        message = f"{CONFIG_FILE} is no PEFT LoRA config: {type(error).__name__}: {error}"
        raise CheckpointError(message, hint=_PLAIN_LORA) from None
    if peft_type != "LORA":
        raise CheckpointError(f"{CONFIG_FILE}: peft_type={peft_type!r} is not supported", hint=_PLAIN_LORA)
    defaults = LoraConfig().to_dict()
    for name, value in config.items():
        if name == "init_lora_weights" and value in _PLAIN_INIT:
            continue
        if name not in _HARMLESS and (value or None) != (defaults.get(name) or None):
            raise CheckpointError(f"{CONFIG_FILE}: {name}={value!r} is not supported", hint=_PLAIN_LORA)
    if not isinstance(targets, list) or {"lm_head", "embed_tokens"} & set(targets):
        hint = "list linear layers of the decoder"
        raise CheckpointError(f"{CONFIG_FILE}: target_modules={targets!r} is not supported", hint=hint)
    if not (isinstance(rank, int) and isinstance(alpha, int | float) and rank >= 1 and alpha > 0):
        message = f"{CONFIG_FILE}: r={rank!r}, lora_alpha={alpha!r} would make the adapter do nothing"
        raise CheckpointError(message, hint=_PLAIN_LORA)
    return config


def read_adapter_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of an adapter directory in fp32, under PEFT's names.

    Raises:
        CheckpointError: there is no safetensors file.
        CheckpointCorrupt: it cannot be read.
    """
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        raise CheckpointError(f"there is no {WEIGHTS_FILE}", hint="other weight formats are not loaded")
    try:
        return {name: tensor.float() for name, tensor in load_file(path).items()}
    except SafetensorError as error:
        raise CheckpointCorrupt(f"{WEIGHTS_FILE} cannot be read: {error}", hint="it was cut off or changed") from None
