"""Adapters as values, and PEFT directories that are read or refused."""

import json
from pathlib import Path

import pytest
import torch

from grpo_core.checkpoints import policy_folder
from grpo_core.errors import CheckpointCorrupt, CheckpointError, ConfigError
from grpo_core.models import BaseModel, load_base_model
from grpo_core.policies.adapters import NO_ADAPTER, AdapterBatch, applied, wrap_linear_layers
from grpo_core.policies.base import tensors_digest
from grpo_core.policies.peft_lora import PeftLoraPolicy

IDS = torch.tensor([[3, 1, 4], [1, 5, 9]])


@pytest.fixture
def base(tiny_model_dir: str) -> BaseModel:
    return load_base_model("smollm2-135m", tiny_model_dir, "cpu", "float32")


def random_policy(base: BaseModel, seed: int) -> PeftLoraPolicy:
    policy = PeftLoraPolicy.create(base, 4, 8, seed)
    for tensor in policy.trainable_parameters().values():
        tensor.data.normal_(0, 0.2, generator=torch.Generator().manual_seed(seed))
    return policy


def test_fresh_adapter_changes_nothing(base: BaseModel) -> None:
    bare = base.model(IDS).logits
    policy = PeftLoraPolicy.create(base, None, None, seed=0)
    with applied(base.model, policy.adapters([])):
        assert torch.equal(base.model(IDS).logits, bare)


def test_each_row_gets_its_own_adapter(base: BaseModel) -> None:
    one, two = random_policy(base, 1).adapters([]), random_policy(base, 2).adapters([])
    both = AdapterBatch(
        {name: torch.cat([one.a[name], two.a[name]]) for name in one.a},
        {name: torch.cat([one.b[name], two.b[name]]) for name in one.b},
        one.scaling,
    )
    with torch.no_grad():
        with applied(base.model, one):
            first = base.model(IDS).logits
        with applied(base.model, two):
            second = base.model(IDS).logits
        with applied(base.model, both, torch.tensor([1, 0])):
            mixed = base.model(IDS).logits
    assert torch.allclose(mixed[0], second[0], atol=1e-5) and torch.allclose(mixed[1], first[1], atol=1e-5)
    assert float((first - second).abs().max()) > 1e-2


def test_adapter_is_gone_after_its_context_even_when_it_fails(base: BaseModel) -> None:
    bare = base.model(IDS).logits
    with pytest.raises(RuntimeError, match="inside"), applied(base.model, random_policy(base, 1).adapters([])):
        raise RuntimeError("inside")
    with applied(base.model, NO_ADAPTER):
        assert torch.equal(base.model(IDS).logits, bare)


def test_gradients_reach_the_policy_and_not_the_base(base: BaseModel) -> None:
    policy = random_policy(base, 1)
    leaves = policy.leaf_adapters([])
    with applied(base.model, leaves):
        base.model(IDS).logits.sum().backward()
    policy.backward(leaves)
    assert all(float(t.grad.abs().max()) > 0 for t in policy.trainable_parameters().values() if t.grad is not None)
    assert all(t.grad is not None and t.dtype == torch.float32 for t in policy.trainable_parameters().values())
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in base.model.parameters())


def test_reference_is_frozen_while_the_policy_moves(base: BaseModel, tmp_path: Path) -> None:
    policy = random_policy(base, 1)
    policy.save(tmp_path)
    policy.set_reference("init", tmp_path)
    before = {name: tensor.clone() for name, tensor in policy.reference_adapters([]).a.items()}
    for tensor in policy.trainable_parameters().values():
        tensor.data += 1
    assert all(torch.equal(policy.reference_adapters([]).a[name], tensor) for name, tensor in before.items())
    assert not any(tensor.requires_grad for tensor in policy.reference_adapters([]).a.values())
    policy.set_reference("base", tmp_path)
    assert policy.reference_adapters([]) is NO_ADAPTER


def test_fresh_adapter_as_reference_is_the_bare_model(base: BaseModel, tmp_path: Path) -> None:
    policy = PeftLoraPolicy.create(base, rank=4, alpha=8, seed=0)  # its B is zero
    policy.save(tmp_path)
    policy.set_reference("init", tmp_path)
    assert policy.reference_adapters([]) is NO_ADAPTER


def test_round_trip_is_bitwise_and_trainable_in_fp32(base: BaseModel, tmp_path: Path) -> None:
    policy = random_policy(base, 1)
    policy.save(tmp_path)
    again = PeftLoraPolicy.load(base, tmp_path)
    assert tensors_digest(again.trainable_parameters()) == tensors_digest(policy.trainable_parameters())
    assert (again.rank, again.alpha) == (4, 8)
    assert all(t.requires_grad and t.dtype == torch.float32 for t in again.trainable_parameters().values())


def test_digest_sees_names_shapes_and_bytes() -> None:
    tensor = torch.arange(6.0)
    digests = {
        tensors_digest({"a": tensor}),
        tensors_digest({"b": tensor}),
        tensors_digest({"a": tensor.view(2, 3)}),
        tensors_digest({"a": tensor.double()}),
        tensors_digest({"a": tensor + 1e-6}),
    }
    assert len(digests) == 5
    assert tensors_digest({"a": tensor, "b": tensor}) == tensors_digest({"b": tensor.clone(), "a": tensor})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_dora", True),
        ("use_rslora", True),
        ("init_lora_weights", "pissa"),
        ("an_option_of_tomorrow", 1),
        ("bias", "all"),
        ("modules_to_save", ["lm_head"]),
        ("rank_pattern", {"q_proj": 2}),
        ("target_parameters", ["x"]),
        ("peft_type", "IA3"),
        ("lora_alpha", 0),
        ("target_modules", ["lm_head"]),
        ("target_modules", "all-linear"),
    ],
)
def test_adapter_that_computes_something_else_is_refused(
    base: BaseModel, tmp_path: Path, field: str, value: object
) -> None:
    random_policy(base, 1).save(tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    with pytest.raises(CheckpointError, match=str(value) if isinstance(value, str) else field.removeprefix("lora_")):
        PeftLoraPolicy.load(base, tmp_path)


def test_adapter_of_another_model_is_refused(base: BaseModel, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    random_policy(base, 1).save(tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    tensors = load_file(path)
    name = next(iter(tensors))
    save_file({**tensors, name: tensors[name][:, :-1].contiguous()}, path)
    with pytest.raises(CheckpointError, match="has shape"):
        PeftLoraPolicy.load(base, tmp_path)
    del tensors[name]
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match="its tensors are not those of this model's layers"):
        PeftLoraPolicy.load(base, tmp_path)


def test_layers_that_are_not_there_are_refused(base: BaseModel) -> None:
    with pytest.raises(ConfigError, match="no linear layers named"):
        wrap_linear_layers(base.model, ["q_proj", "query"])


@pytest.mark.parametrize(
    ("name", "content", "error", "said"),
    [
        ("adapter_config.json", b"{", CheckpointError, "is no PEFT LoRA config: JSONDecodeError"),
        ("adapter_config.json", b"[]", CheckpointError, "is no PEFT LoRA config: TypeError"),
        ("adapter_config.json", b'{"peft_type": "LORA"}', CheckpointError, "KeyError: 'r'"),
        ("adapter_config.json", None, CheckpointError, "there is no adapter_config.json"),
        ("adapter_model.safetensors", b"cut", CheckpointCorrupt, "cannot be read"),
        ("adapter_model.safetensors", None, CheckpointError, "there is no adapter_model.safetensors"),
    ],
)
def test_broken_adapter_directory_is_named_with_its_url_and_field(
    base: BaseModel, tmp_path: Path, name: str, content: bytes | None, error: type[CheckpointError], said: str
) -> None:
    random_policy(base, 1).save(tmp_path)
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(error) as refused, policy_folder(str(tmp_path), "init_adapter_dir") as folder:
        PeftLoraPolicy.load(base, folder)
    assert str(refused.value).startswith(f"init_adapter_dir: {tmp_path}: ") and said in refused.value.message
    assert refused.value.exit_code == (1 if error is CheckpointCorrupt else 2)
