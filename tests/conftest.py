"""What all tests stand on: a home of their own, no network, no telemetry, and tiny models of each architecture.

The environment is set when this file is imported, because Prefect, MLflow and torch read it when they are imported.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from faulty import Fault
    from transformers import PretrainedConfig, PreTrainedTokenizerFast

    from grpo_core.config import GRPOConfig, SFTConfig

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _isolate() -> None:
    """Give the tests a home that ends with them; a developer's own lab, Prefect or MLflow is never touched."""
    for name in [name for name in os.environ if name.startswith(("LAB_", "PREFECT_", "MLFLOW_"))]:
        del os.environ[name]
    home = Path(tempfile.mkdtemp(prefix="grpo-lab-tests-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    os.environ.update(
        LAB_HOME=str(home / "lab"),
        PREFECT_HOME=str(home / "prefect"),
        PREFECT_SERVER_ANALYTICS_ENABLED="false",
        MLFLOW_DISABLE_TELEMETRY="true",
        DO_NOT_TRACK="true",
        HF_HUB_OFFLINE="1",
        HF_HUB_DISABLE_TELEMETRY="1",
        TOKENIZERS_PARALLELISM="false",
    )
    # A shell's background job ignores Ctrl-C, and so would every process that a test starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Tiny models are slower on many threads, and workers of pytest-xdist would share the cores anyway.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


_isolate()


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder in which `tiny_model_dir` keeps one model per architecture for the whole run."""
    return tmp_path_factory.mktemp("tiny-models")


@pytest.fixture(scope="session")
def tiny_model_dir(request: pytest.FixtureRequest, tiny_models: Path) -> str:
    """Folder of a randomly initialised two-layer model with tokenizer, as `model_dir` takes it; llama by default.

    Another architecture: ``@pytest.mark.parametrize("tiny_model_dir", ["qwen3", "mistral"], indirect=True)``.
    """
    folder = tiny_models / getattr(request, "param", "llama")
    if not folder.exists():
        _save_tiny_model(folder.name, folder)
    return str(folder)


@pytest.fixture(scope="session")
def prefect_harness() -> Iterator[None]:
    """A real Prefect API on a temporary database, one for the whole run because it takes seconds to start."""
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=120):
        yield


def _save_tiny_model(architecture: str, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    tokenizer = _byte_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(_tiny_config(architecture, tokenizer), dtype=torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _tiny_config(architecture: str, tokenizer: PreTrainedTokenizerFast) -> PretrainedConfig:
    from transformers import AutoConfig

    own = {
        "llama": {"tie_word_embeddings": True},
        "qwen3": {"tie_word_embeddings": False},
        "mistral": {"tie_word_embeddings": False, "sliding_window": None},
    }[architecture]
    return AutoConfig.for_model(
        architecture,
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=8192,
        # The usual 0.02 leaves logits so flat that no adapter of a frozen tiny model could learn anything.
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **own,
    )


def _byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per UTF-8 byte, two turn markers, and, as in SmolLM2, padding that is the end-of-turn token.

    So a mask made by comparing with the padding id would drop the token that ends a completion.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|im_end|>")
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Callable[[Fault], None]:
    """Sets what goes wrong at ``faulty://``; whoever writes there is quick to try again, renew its lease or give up."""
    import fsspec
    from faulty import FaultyFileSystem

    from grpo_core import keeping, lease

    fsspec.register_implementation("faulty", FaultyFileSystem, clobber=True)
    monkeypatch.setattr(FaultyFileSystem, "fault", FaultyFileSystem.fault)
    monkeypatch.setattr(keeping, "RETRY_DELAYS_S", (0.0,) * 40)
    monkeypatch.setattr(lease, "SETTLE_S", 0.0)
    monkeypatch.setattr(lease.Lease.__init__, "__defaults__", (0.05, 1.0, *lease.Lease.__init__.__defaults__[2:]))
    return lambda fault: setattr(FaultyFileSystem, "fault", staticmethod(fault))


@pytest.fixture
def common(tiny_model_dir: str) -> dict[str, Any]:
    """What jobs on the tiny model and the environment `letters` (an entry point beside this file) have in common."""
    from loops import FAMILY

    family = FAMILY[Path(tiny_model_dir).name]
    return {
        "family": family,
        "model_dir": tiny_model_dir,
        "environment": "letters",
        "device": "cpu",
        "dtype": "float32",
    }


@pytest.fixture
def sft(common: dict[str, Any], tmp_path: Path) -> Callable[..., SFTConfig]:
    """Makes SFT configs of three short steps; what is given overrides the defaults."""
    from grpo_core.config import SFTConfig

    defaults = {**common, "examples": 12, "examples_per_step": 4, "eval_examples": 2, "lora_rank": 4, "lr": 1e-2}
    return lambda **given: SFTConfig.parse({**defaults, "checkpoint_dir": str(tmp_path / "sft"), **given})


@pytest.fixture
def grpo(common: dict[str, Any], tmp_path: Path) -> Callable[..., GRPOConfig]:
    """Makes GRPO configs of five short steps; what is given overrides the defaults."""
    from grpo_core.config import GRPOConfig

    defaults = {**common, "policy": "peft-lora", "prompts": 10, "prompts_per_step": 2, "group_size": 4, "lr": 1e-2}
    return lambda **given: GRPOConfig.parse({**defaults, "checkpoint_dir": str(tmp_path / "rl"), **given})
