"""The table of base-model families: where weights come from and what suits them. No torch here.

A family fixes its LoRA preset, chat-template options and context limit. `model_dir`
replaces the weights of any family, never its architecture.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from grpo_core.errors import ConfigError

FamilyName = Literal["qwen3-4b", "qwen3-0.6b", "mistral-7b", "smollm2-135m"]

ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class LoraPreset:
    """Defaults of a plain LoRA adapter. `lr` suits both SFT and GRPO, which see the same few steps."""

    rank: int = 16
    alpha: int = 32
    target_modules: tuple[str, ...] = ALL_LINEAR
    lr: float = 2e-4


@dataclass(frozen=True)
class Family:
    """One base-model family.

    Attributes:
        architecture: ``model_type`` of the transformers config; a `model_dir` must have the same.
        hub_id: where transformers finds the weights, or None for the embedded GGUF package.
        context_limit: tokens of prompt and completion together.
        chat_template_options: passed to the tokenizer's chat template at every rendering.
    """

    name: str
    architecture: str
    hub_id: str | None
    context_limit: int
    lora: LoraPreset = field(default_factory=LoraPreset)
    chat_template_options: Mapping[str, Any] = field(default_factory=dict)


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family(
            "qwen3-4b",
            "qwen3",
            "Qwen/Qwen3-4B",
            context_limit=32_768,
            lora=LoraPreset(lr=1e-4),
            chat_template_options={"enable_thinking": False},
        ),
        Family(
            "qwen3-0.6b",
            "qwen3",
            "Qwen/Qwen3-0.6B",
            context_limit=32_768,
            chat_template_options={"enable_thinking": False},
        ),
        Family(
            "mistral-7b",
            "mistral",
            "mistralai/Mistral-7B-Instruct-v0.3",
            context_limit=32_768,
            lora=LoraPreset(lr=1e-4),
        ),
        Family("smollm2-135m", "llama", None, context_limit=8_192),
    )
}
assert set(FAMILIES) == set(get_args(FamilyName))


def check_model_dir(family: Family, model_dir: str) -> None:
    """Refuse a folder that is not a model of the family's architecture, without loading weights.

    Raises:
        ConfigError: the folder or its config is missing, names remote code, or is another architecture.
    """
    folder = Path(model_dir).expanduser()
    config_file = folder / "config.json"
    if not folder.is_dir():
        raise ConfigError(
            f"there is no folder {model_dir!r}",
            field="model_dir",
            hint="give a folder with config.json and *.safetensors",
        )
    if not config_file.is_file():
        raise ConfigError(
            f"{model_dir!r} has no config.json", field="model_dir", hint="give a folder saved by save_pretrained"
        )
    try:
        config = json.loads(config_file.read_bytes())
    except ValueError as error:
        message = f"{str(config_file)!r} is not JSON: {type(error).__name__}"
        raise ConfigError(message, field="model_dir", hint="give a folder saved by save_pretrained") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{str(config_file)!r} holds no object", field="model_dir")
    if config.get("auto_map"):
        raise ConfigError(
            f"{model_dir!r} asks for remote code (auto_map)",
            field="model_dir",
            hint="remote code is never run; use a model that transformers knows",
        )
    if config.get("model_type") != family.architecture:
        raise ConfigError(
            f"{model_dir!r} is a {config.get('model_type')!r} model, family {family.name!r} is {family.architecture!r}",
            field="model_dir",
            hint="choose the family of that architecture or another folder",
        )
    if not list(folder.glob("*.safetensors")):
        raise ConfigError(
            f"{model_dir!r} has no *.safetensors weights", field="model_dir", hint="other weight formats are not loaded"
        )


def weights_fingerprint(source: str) -> str:
    """What tells two sets of weights apart without reading all of them: SHA-256 over samples, 16 hex digits.

    Names and sizes of a folder's safetensors files and 64 evenly spaced pieces of each; a hub id stands for
    itself.
    """
    folder = Path(source)
    if not folder.is_dir():
        return source
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name}|{size}".encode())
        with path.open("rb") as file:
            for piece in range(64):
                file.seek(size * piece // 64)
                digest.update(file.read(4096))
    return digest.hexdigest()[:16]
