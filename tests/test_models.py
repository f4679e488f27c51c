"""Loading base models: devices, number formats, weights that are not there."""

import json
import time
from pathlib import Path

import pytest
import torch

from grpo_core.chat import Chat
from grpo_core.config import SFTConfig
from grpo_core.errors import ConfigError
from grpo_core.models import load_base_model, resolve_device, resolve_dtype


def test_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert resolve_device("auto") == torch.device("cpu")
    for name in ("cuda", "metal"):
        with pytest.raises(ConfigError, match=f"'{name}' is not available") as refused:
            resolve_device(name)
        assert refused.value.field == "device"


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [({"avx2": True}, torch.float32), ({"avx512_bf16": True}, torch.bfloat16), ({"amx_bf16": True}, torch.bfloat16)],
)
def test_bfloat16_only_where_the_cpu_computes_in_it(
    monkeypatch: pytest.MonkeyPatch, capabilities: dict[str, bool], expected: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert resolve_dtype("auto", torch.device("cpu")) == expected
    assert resolve_dtype("float32", torch.device("cpu")) == torch.float32


def test_base_is_frozen_and_in_eval_mode(tiny_model_dir: str) -> None:
    base = load_base_model("smollm2-135m", tiny_model_dir, "cpu", "float32")
    assert not base.model.training
    assert not any(parameter.requires_grad for parameter in base.model.parameters())


def test_stop_ids_hold_the_end_of_turn_even_when_it_is_the_padding_token(tiny_model_dir: str) -> None:
    base = load_base_model("smollm2-135m", tiny_model_dir, "cpu", "float32")
    chat = Chat(base)
    assert base.tokenizer.pad_token_id == base.tokenizer.eos_token_id == chat.end_of_turn
    ids = chat.completion_ids("ab")
    assert len(ids) == 3 and ids[-1] == chat.end_of_turn  # "a", "b" and the end of the turn, which is trained
    assert chat.text(ids) == "ab" and chat.text(ids[:-1]) == "ab"


def test_training_prefix_is_the_generation_prompt_byte_for_byte(tiny_model_dir: str) -> None:
    base = load_base_model("smollm2-135m", tiny_model_dir, "cpu", "float32")
    messages = [{"role": "user", "content": "Hi"}]
    ids = Chat(base).prompt_ids(messages, 4)
    assert base.tokenizer.decode(ids) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no config.json"),
        ("{", "is not JSON"),
        ({"model_type": "gpt2"}, "is a 'gpt2' model, family 'smollm2-135m' is 'llama'"),
        ({"model_type": "llama", "auto_map": {"AutoModel": "x.Y"}}, "remote code"),
        ({"model_type": "llama"}, "no *.safetensors"),
    ],
)
def test_foreign_model_folder_is_refused_before_any_weight_is_read(
    tmp_path: Path, content: dict | str | None, said: str
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ConfigError) as refused:
        SFTConfig.parse({"family": "smollm2-135m", "model_dir": str(tmp_path)})
    assert said in str(refused.value) and refused.value.field == "model_dir"


@pytest.mark.slow
def test_smollm2_is_dequantised_once_and_two_processes_may_race(tmp_path: Path) -> None:
    import os
    import subprocess
    import sys

    code = "from grpo_core.models import smollm2_folder; print(smollm2_folder())"
    environment = {**os.environ, "LAB_HOME": str(tmp_path)}
    racers = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    folders = {racer.communicate(timeout=300)[0].strip() for racer in racers}
    assert [racer.returncode for racer in racers] == [0, 0]
    (folder,) = folders
    assert [path.name for path in Path(folder).parent.iterdir()] == [Path(folder).name]  # no staging folder stays
    before = (Path(folder) / "model.safetensors").stat().st_mtime_ns
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True)
    assert (Path(folder) / "model.safetensors").stat().st_mtime_ns == before


@pytest.mark.slow
def test_smollm2_answers_from_its_cache() -> None:
    from grpo_core.policies.adapters import NO_ADAPTER
    from grpo_core.sampling import SamplingSettings, TorchSampler, addressed_uniforms

    load_base_model("smollm2-135m")
    started = time.monotonic()
    # fp32: in bfloat16 the two likeliest first tokens, 0.1 apart, can round to the same logit
    base = load_base_model("smollm2-135m", dtype="float32")
    print(f"loaded from the cache in {time.monotonic() - started:.2f} s")
    chat = Chat(base)
    prompt = chat.prompt_ids([{"role": "user", "content": "What is the capital of France?"}], 12)
    settings = SamplingSettings(12, 0.0, chat.stop_ids)
    ((completion,),) = (
        TorchSampler(base).sample([prompt], NO_ADAPTER, settings, addressed_uniforms(0, 0, 0, 0, 1, 12)[None]).groups
    )
    assert chat.text(completion.ids) == "The capital of France is Paris."
