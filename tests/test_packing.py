"""A packed group against the same completions computed one by one, in fp64: same numbers, same gradients."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from loops import FAMILY
from torch import Tensor
from transformers import AutoModelForCausalLM

import grpo_core.engines.blocks
import grpo_core.engines.decoder
import grpo_core.engines.generic
import grpo_core.packing
from grpo_core.engines.base import Engine
from grpo_core.engines.generic import GenericEngine
from grpo_core.engines.native import NativeEngine
from grpo_core.logprobs import token_logprobs
from grpo_core.models import BaseModel, load_base_model
from grpo_core.packing import PADDING, PROMPT, PackedRows, attention_masks, pack_groups, packed_length, visible
from grpo_core.policies.adapters import applied
from grpo_core.policies.peft_lora import PeftLoraPolicy

ARCHITECTURES = pytest.mark.parametrize("tiny_model_dir", ["llama", "qwen3", "mistral"], indirect=True)

# Two prompts of unlike length; ragged completions, one of a single token and one empty.
GROUPS = [
    ([5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15], [[20, 21, 22, 23], [30], [], [40, 41]]),
    ([50, 51, 52, 53], [[60, 61, 62], [70, 71, 72, 73, 74]]),
]


def base_in_fp64(folder: str, window: int | None = None) -> BaseModel:
    family = FAMILY[folder.rpartition("/")[2]]
    base = load_base_model(family, folder, "cpu", "float32")
    if window is not None:
        base.model.config.sliding_window = window
        if hasattr(base.model.config, "layer_types"):
            base.model.config.layer_types = ["sliding_attention"] * base.model.config.num_hidden_layers
            base.model.config.use_sliding_window = True
        model = AutoModelForCausalLM.from_config(base.model.config)
        model.load_state_dict(base.model.state_dict())
        object.__setattr__(base, "model", model.eval().requires_grad_(False))
    base.model.double()
    for module in base.model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(exact_rms_norm, module)  # transformers computes it in fp32 whatever the dtype
    return base


def exact_rms_norm(module: torch.nn.Module, x: Tensor) -> Tensor:
    return module.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + module.variance_epsilon)


def policy_of(base: BaseModel) -> PeftLoraPolicy:
    """A policy whose adapter really does something: B is not zero, and all is fp64."""
    policy = PeftLoraPolicy.create(base, rank=4, alpha=8, seed=1)
    generator = torch.Generator().manual_seed(2)
    for name, tensor in policy.trainable_parameters().items():
        tensor.data = tensor.data.double()
        if "lora_B" in name:
            tensor.data.normal_(0, 0.1, generator=generator)
    return policy


def unshared(base: BaseModel, temperature: float) -> Tensor:
    """The definition: each completion after its own copy of the prompt, through the model's own forward and mask."""
    parts = []
    for prompt, completions in GROUPS:
        for completion in completions:
            if completion:
                logits = base.model(input_ids=torch.tensor([[*prompt, *completion]])).logits[0]
                predicting = torch.log_softmax(logits[len(prompt) - 1 : -1] / temperature, dim=-1)
                parts.append(predicting.gather(1, torch.tensor(completion)[:, None]).squeeze(1))
    return torch.cat(parts)


def gradients(policy: PeftLoraPolicy, compute: Callable[[], Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    for tensor in policy.trainable_parameters().values():
        tensor.grad = None
    leaves = policy.leaf_adapters([])
    with applied(policy.base.model, leaves):
        logprobs = compute()
        (logprobs * torch.linspace(1, 2, len(logprobs), dtype=torch.float64)).sum().backward()
    policy.backward(leaves)
    return logprobs.detach(), {
        n: t.grad.clone() for n, t in policy.trainable_parameters().items() if t.grad is not None
    }


@ARCHITECTURES
@pytest.mark.parametrize("engine", [NativeEngine, GenericEngine])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("window", [None, 5])
def test_shared_prompt_gives_the_unshared_logprobs_and_gradients(
    tiny_model_dir: str, engine: type[Engine], temperature: float, window: int | None
) -> None:
    if window and tiny_model_dir.endswith("llama"):
        pytest.skip("Llama has no sliding window")
    base = base_in_fp64(tiny_model_dir, window)
    policy = policy_of(base)
    base.__dict__["engine"] = engine(base.model)
    shared, shared_gradients = gradients(policy, lambda: token_logprobs(base, GROUPS, temperature))
    expected, expected_gradients = gradients(policy, lambda: unshared(base, temperature))
    assert len(expected) == 15  # 4 + 1 + 0 + 2 and 3 + 5 completion tokens
    assert torch.allclose(shared, expected, atol=1e-9, rtol=0)
    assert set(shared_gradients) == set(policy.trainable_parameters())
    for name, gradient in expected_gradients.items():
        assert float(gradient.abs().max()) > 1e-6
        assert torch.allclose(shared_gradients[name], gradient, atol=1e-9, rtol=0), name


def leaking(*args: Tensor, **_: object) -> Tensor:
    query_positions, _, key_positions, _, *_ = args
    return (key_positions[:, None, :] <= query_positions[:, :, None])[:, None]


@pytest.mark.parametrize("engine", [NativeEngine, GenericEngine])
@pytest.mark.parametrize("mutant", ["leak", "shifted", "no_window"])
@pytest.mark.parametrize("tiny_model_dir", ["mistral"], indirect=True)
def test_the_comparison_would_notice_a_fault(
    tiny_model_dir: str, engine: type[Engine], mutant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = base_in_fp64(tiny_model_dir, window=5)
    base.__dict__["engine"] = engine(base.model)
    monkeypatch.setattr(GenericEngine, "_verify", lambda *_: None)  # it would notice, and compute unshared
    rule = {"leak": leaking, "no_window": lambda *places: visible(*places[:4], None)}.get(mutant)
    if rule is not None:
        monkeypatch.setattr(grpo_core.packing, "visible", rule)
        monkeypatch.setattr(grpo_core.engines.blocks, "visible", rule)
    else:
        rotary, packed = grpo_core.engines.decoder.Decoder._rope, grpo_core.engines.generic.pack_groups
        monkeypatch.setattr(grpo_core.engines.decoder.Decoder, "_rope", lambda d, p, x: rotary(d, p + (p > 8), x))
        monkeypatch.setattr(grpo_core.engines.generic, "pack_groups", lambda *groups: shifted(packed(*groups)))
    with applied(base.model, policy_of(base).adapters([])):
        assert float((token_logprobs(base, GROUPS) - unshared(base, 1.0)).abs().max()) > 1e-3


def shifted(packed: PackedRows) -> PackedRows:
    packed.positions[packed.segments > PROMPT] += 1
    return packed


@ARCHITECTURES
@pytest.mark.parametrize("window", [None, 5])
def test_prompts_of_the_sampler_are_trained_on_as_if_computed_again(tiny_model_dir: str, window: int | None) -> None:
    if window and tiny_model_dir.endswith("llama"):
        pytest.skip("Llama has no sliding window")
    base = base_in_fp64(tiny_model_dir, window)
    policy = policy_of(base)
    again, expected = gradients(policy, lambda: token_logprobs(base, GROUPS))
    leaves = policy.leaf_adapters([])
    prefill = base.engine.prefill([prompt for prompt, _ in GROUPS], leaves)
    base.engine.decoding(prefill, 2).step(torch.tensor([20, 30, 60, 70]))  # decoding in between changes nothing
    for tensor in policy.trainable_parameters().values():
        tensor.grad = None
    with applied(base.model, leaves):
        logprobs = token_logprobs(base, GROUPS, prefill=prefill)
    (logprobs * torch.linspace(1, 2, len(logprobs), dtype=torch.float64)).sum().backward()
    policy.backward(leaves)
    assert torch.allclose(logprobs, again, atol=1e-9, rtol=0)
    for name, tensor in policy.trainable_parameters().items():
        assert tensor.grad is not None
        assert torch.allclose(tensor.grad, expected[name], atol=1e-9, rtol=0), name


def test_layout_of_a_row() -> None:
    packed = pack_groups([([1, 2, 3], [[7, 8, 9], [5]]), ([4], [[6, 6]])])
    # the last token of a completion predicts nothing and is not computed; [5] is predicted by the prompt alone
    assert packed.input_ids.tolist() == [[1, 2, 3, 7, 8], [4, 6, 0, 0, 0]]
    assert packed.positions.tolist() == [[0, 1, 2, 3, 4], [0, 1, 0, 0, 0]]
    assert packed.segments.tolist() == [[0, 0, 0, 1, 1], [0, 1, PADDING, PADDING, PADDING]]
    assert packed.targets.tolist() == [7, 8, 9, 5, 6, 6]
    assert packed.source.tolist() == [2, 3, 4, 2, 0, 1]
    assert packed.row.tolist() == [0, 0, 0, 0, 1, 1]
    assert packed_length([1, 2, 3], [[7, 8, 9], [5]]) == 5


def test_every_completion_token_is_trained_and_no_prompt_token() -> None:
    # prompt of 3, answer of 2 with padding id == end id: both answer tokens are targets, the first one included
    packed = pack_groups([([1, 2, 3], [[4, 0]])])
    assert packed.targets.tolist() == [4, 0]


def test_window_counts_positions_not_columns() -> None:
    # prompt 0..3; two completions at positions 4, 5 each; window 2 sees its own position and the one before
    packed = pack_groups([([1, 2, 3, 4], [[5, 6, 7], [8, 9, 10]])])
    seen = visible(packed.positions, packed.segments, packed.positions, packed.segments, window=2)[0, 0]
    assert seen[4].nonzero().squeeze(1).tolist() == [3, 4]
    assert seen[6].nonzero().squeeze(1).tolist() == [3, 6]  # column 6 is position 4 of the second completion
    assert seen[7].nonzero().squeeze(1).tolist() == [6, 7]


@pytest.mark.parametrize("tiny_model_dir", ["qwen3"], indirect=True)
def test_mask_has_one_entry_per_layer_type(tiny_model_dir: str) -> None:
    base = base_in_fp64(tiny_model_dir)
    base.model.config.layer_types = ["full_attention", "sliding_attention"]
    base.model.config.sliding_window = 2
    positions, segments = torch.arange(4)[None], torch.zeros(1, 4, dtype=torch.long)
    masks = attention_masks(base.model, positions, segments, positions, segments)
    assert isinstance(masks, dict)
    assert masks["full_attention"].sum() == 10 and masks["sliding_attention"].sum() == 7  # 1+2+3+4 and 1+2+2+2


def test_temperature_divides_the_logits() -> None:
    # logits [2, 0]: -log(1 + e^-2) = -0.126928; at temperature 0.5, [4, 0]: -log(1 + e^-4) = -0.018150
    from grpo_core.logprobs import _ChunkedLogProbs

    weight = torch.tensor([[2.0], [0.0]], dtype=torch.float64)
    one, zero = torch.ones(1, 1, dtype=torch.float64), torch.tensor([0])
    assert float(_ChunkedLogProbs.apply(one, weight, zero, 1.0)) == pytest.approx(-0.126928, abs=1e-6)
    assert float(_ChunkedLogProbs.apply(one, weight, zero, 0.5)) == pytest.approx(-0.018150, abs=1e-6)


def test_chunked_logprobs_pass_gradcheck_over_several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    import grpo_core.logprobs as logprobs

    monkeypatch.setattr(logprobs, "_CHUNK", 3)
    monkeypatch.setattr(logprobs, "_SLICE", 2)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(7, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 5, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 11, (7,), generator=generator)
    assert torch.autograd.gradcheck(lambda h: logprobs._ChunkedLogProbs.apply(h, weight, targets, 0.7), (hidden,))
