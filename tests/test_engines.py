"""Engines against autograd, against each other, and in the corners: several adapters, long blocks, rows that end."""

import logging
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import grpo_core.engines.blocks
import grpo_core.engines.decoding
import grpo_core.engines.native
from grpo_core.engines.choice import make_engine
from grpo_core.engines.functions import AdaptedProduct, Block, BlockAttention, RMSNorm, Rotary, SwiGLU
from grpo_core.engines.generic import GenericDecoding, GenericEngine
from grpo_core.engines.native import NativeEngine
from grpo_core.logprobs import token_logprobs
from grpo_core.models import BaseModel, load_base_model
from grpo_core.policies.adapters import AdapterBatch, applied
from grpo_core.policies.peft_lora import PeftLoraPolicy
from grpo_core.sampling import SamplingSettings, TorchSampler, addressed_uniforms

GROUPS = [
    ([5, 6, 7, 8, 9, 10, 11, 12, 13], [[20, 21, 22, 23, 24, 25], [30], [], [40, 41, 42]]),
    ([50, 51, 52, 53], [[60, 61, 62], [70, 71, 72, 73, 74], [80, 81]]),
]
PROMPTS = [prompt for prompt, _ in GROUPS]


def numbers(*shape: int, seed: int = 0, grad: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_(grad)


def in_fp64(folder: str) -> BaseModel:
    base = load_base_model("smollm2-135m", folder, "cpu", "float32")
    base.model.double()
    return base


def two_adapters(base: BaseModel) -> AdapterBatch:
    """One adapter for each group, in fp64, both with an effect."""
    policies = [PeftLoraPolicy.create(base, 4, 8, seed) for seed in (1, 2)]
    for seed, policy in enumerate(policies):
        for tensor in policy.trainable_parameters().values():
            tensor.data.normal_(0, 0.2, generator=torch.Generator().manual_seed(seed))
    one, two = (policy.adapters([]) for policy in policies)
    a = {name: torch.cat([one.a[name], two.a[name]]).double().requires_grad_() for name in one.a}
    b = {name: torch.cat([one.b[name], two.b[name]]).double().requires_grad_() for name in one.b}
    return AdapterBatch(a, b, one.scaling)


# --- the pieces against finite differences and plain expressions -------------------------------------------


def test_adapted_product_is_w_plus_ba_of_each_span() -> None:
    x, weight = numbers(5, 3), numbers(4, 3, seed=1, grad=False)
    a, b = numbers(2, 2, 3, seed=2), numbers(2, 4, 2, seed=3)
    spans = [slice(0, 2), slice(2, 5)]
    expected = torch.cat([x[span] @ (weight + b[i] @ a[i]).T for i, span in enumerate(spans)])
    assert torch.allclose(AdaptedProduct.apply(x, weight, a, b, spans), expected, atol=1e-12)
    assert torch.autograd.gradcheck(
        lambda *leaves: AdaptedProduct.apply(leaves[0], weight, *leaves[1:], spans), (x, a, b)
    )


def test_rms_norm() -> None:
    # mean of squares of (3, 4) is 12.5; 3 / sqrt(12.5) = 0.848528, 4 / sqrt(12.5) = 1.131371, times weights 1 and 2
    x, weight = torch.tensor([[3.0, 4.0]], dtype=torch.float64), torch.tensor([1.0, 2.0], dtype=torch.float64)
    assert RMSNorm.apply(x, weight, 0.0)[0].tolist() == pytest.approx([0.848528, 2.262742], abs=1e-6)
    assert torch.autograd.gradcheck(lambda y: RMSNorm.apply(y, weight, 1e-3), (numbers(2, 3, 2),))


def test_swiglu_and_rotary() -> None:
    # silu(1) = 0.731059; times 3
    assert float(SwiGLU.apply(torch.tensor([[1.0, 3.0]]))) == pytest.approx(2.193176, abs=1e-6)
    assert torch.autograd.gradcheck(lambda x: SwiGLU.apply(x), (numbers(3, 4),))
    # a quarter turn carries (1, 0) to (0, 1): cos 0, and sin 1 with its first half negated
    cos, sin = torch.zeros(1, 1, 2), torch.tensor([[[-1.0, 1.0]]])
    assert Rotary.apply(torch.tensor([[[1.0, 0.0]]]), cos, sin).flatten().tolist() == [0.0, 1.0]
    cos, sin = numbers(2, 1, 4, seed=1, grad=False), numbers(2, 1, 4, seed=2, grad=False)
    half = sin[..., :2]
    sin = torch.cat([-half, half], dim=-1)
    cos = torch.cat([cos[..., :2], cos[..., :2]], dim=-1)
    assert torch.autograd.gradcheck(lambda x: Rotary.apply(x, cos, sin), (numbers(2, 3, 4),))


def test_block_attention_passes_gradcheck_with_prefix_mask_and_grouped_heads() -> None:
    mask = torch.tensor([[0.0, float("-inf")], [0.0, 0.0]], dtype=torch.float64)
    blocks = [
        Block(slice(0, 2), slice(0, 2), slice(0, 3), mask),
        Block(slice(2, 4), slice(2, 4), slice(1, 3), mask),  # the prefix is seen by two blocks: its gradients add up
    ]
    leaves = (numbers(4, 4, 2), numbers(4, 2, 2, seed=1), numbers(4, 2, 2, seed=2))
    prefix = (numbers(3, 2, 2, seed=3), numbers(3, 2, 2, seed=4))
    assert torch.autograd.gradcheck(lambda *each: BlockAttention.apply(*each, blocks), (*leaves, *prefix))


# --- several adapters, small blocks, rows that end ----------------------------------------------------------


def scored(base: BaseModel, adapters: AdapterBatch) -> tuple[Tensor, list[Tensor]]:
    with applied(base.model, adapters, torch.arange(2)):
        logprobs = token_logprobs(base, GROUPS)
        weights = torch.linspace(1, 2, len(logprobs), dtype=torch.float64)
        gradients = torch.autograd.grad((logprobs * weights).sum(), [*adapters.a.values(), *adapters.b.values()])
    return logprobs.detach(), list(gradients)


def test_an_adapter_for_each_group(tiny_model_dir: str) -> None:
    base = in_fp64(tiny_model_dir)
    adapters = two_adapters(base)
    base.__dict__["engine"] = NativeEngine(base.model)
    ours, our_gradients = scored(base, adapters)
    base.__dict__["engine"] = GenericEngine(base.model)
    base.engine._verified = True  # type: ignore[attr-defined]
    theirs, their_gradients = scored(base, adapters)
    # transformers' RMSNorm computes in fp32, whatever the model's dtype
    assert torch.allclose(ours, theirs, atol=1e-5, rtol=0)
    assert all(torch.allclose(a, b, atol=1e-4, rtol=0) for a, b in zip(our_gradients, their_gradients, strict=True))
    with applied(base.model, adapters, torch.tensor([1, 0])), torch.no_grad():
        swapped = token_logprobs(base, GROUPS)
    assert float((swapped - theirs).abs().max()) > 1e-3


def test_blocks_of_any_size_give_the_same(tiny_model_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    base = in_fp64(tiny_model_dir)
    adapters = two_adapters(base)
    whole, gradients = scored(base, adapters)
    monkeypatch.setattr(grpo_core.engines.blocks, "LONGEST_BLOCK", 2)
    monkeypatch.setattr(grpo_core.engines.blocks, "SHORTEST_BLOCK", 3)
    cut, cut_gradients = scored(base, adapters)
    assert torch.allclose(whole, cut, atol=1e-12, rtol=0)
    assert all(torch.allclose(a, b, atol=1e-10, rtol=0) for a, b in zip(gradients, cut_gradients, strict=True))


@pytest.mark.parametrize("window", [None, 3])
def test_decoding_continues_as_the_generic_engine_does(
    tiny_model_dir: str, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ragged prompts, an adapter each, prefilled in two passes; rows leave, the cache grows and is made small."""
    monkeypatch.setattr(grpo_core.engines.native, "PREFILL_TOKENS", 5)
    monkeypatch.setattr(grpo_core.engines.decoding, "CACHE_TOKENS", 2)
    base = load_base_model("smollm2-135m", tiny_model_dir, "cpu", "float32")
    base.model.config.sliding_window = window
    adapters = two_adapters(base)
    adapters = AdapterBatch(
        {name: a.detach().float() for name, a in adapters.a.items()},
        {name: b.detach().float() for name, b in adapters.b.items()},
        adapters.scaling,
    )
    engine = NativeEngine(base.model)
    with torch.no_grad():
        native = engine.decoding(engine.prefill(PROMPTS, adapters), 3)
        generic = GenericDecoding(base.model, PROMPTS, adapters, 3)
        generator = torch.Generator().manual_seed(0)
        # six rows, then four, then one of the second group alone (the first group's prompt is given up)
        for kept in ([0, 1, 2, 3, 4, 5], [0, 2, 3, 5], [0, 1, 2, 3], [3], [0], [0]):
            assert torch.allclose(native.hidden, generic.hidden, atol=1e-5)
            native.keep(torch.tensor(kept))
            generic.keep(torch.tensor(kept))
            tokens = torch.randint(0, 250, (len(kept),), generator=generator)
            native.step(tokens)
            generic.step(tokens)
        assert torch.allclose(native.hidden, generic.hidden, atol=1e-5)


# --- which engine -------------------------------------------------------------------------------------------


def llama(**options: object) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, **options)  # type: ignore[arg-type]
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def test_a_model_that_is_not_known_exactly_takes_the_generic_engine() -> None:
    assert isinstance(make_engine(llama()), NativeEngine)
    assert isinstance(make_engine(llama(attention_bias=True)), GenericEngine)
    assert isinstance(make_engine(llama(hidden_act="gelu")), GenericEngine)


def test_the_models_own_forward_is_the_same_after_its_weights_were_joined() -> None:
    model, ids = llama(), torch.tensor([[1, 2, 3, 4]])
    before = model(ids).logits
    NativeEngine(model)
    assert torch.equal(model(ids).logits, before)


def test_the_generic_engine_computes_unshared_where_a_model_ignores_the_mask(caplog: pytest.LogCaptureFixture) -> None:
    model = llama(hidden_act="gelu")
    heeded = GenericEngine(model)
    expected = heeded.predicting(GROUPS)
    assert heeded.shares_prompts and not caplog.records

    forward = model.model.forward
    model.model.forward = lambda *args, attention_mask=None, **options: forward(*args, **options)  # type: ignore[method-assign]
    deaf = GenericEngine(model)
    with caplog.at_level(logging.WARNING):
        unshared = deaf.predicting(GROUPS)
    assert not deaf.shares_prompts
    assert "computed unshared" in caplog.text
    assert torch.allclose(unshared, expected, atol=1e-5)


def test_an_adapter_for_each_group_when_nothing_is_shared(tiny_model_dir: str) -> None:
    base = in_fp64(tiny_model_dir)
    adapters = two_adapters(base)
    values = []
    for shares in (True, False):
        engine = GenericEngine(base.model)
        engine._verified, engine.shares_prompts = True, shares
        base.__dict__["engine"] = engine
        values.append(scored(base, adapters)[0])
    assert torch.allclose(*values, atol=1e-5, rtol=0)


# --- the sampler on the real model --------------------------------------------------------------------------


def sampled_against_policy(base: BaseModel) -> Tensor:
    """|log-probability as sampled - as trained| of 4 groups of 8 completions of 16 tokens, prompts of 150 to 250."""
    policy = PeftLoraPolicy.create(base, 16, 32, seed=0)
    for name, tensor in policy.trainable_parameters().items():
        if "lora_B" in name:
            tensor.data.normal_(0, 0.01, generator=torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(1000, 40_000, (n,), generator=generator).tolist() for n in (150, 180, 210, 250)]
    uniforms = np.stack([addressed_uniforms(0, 1, prompt, 0, 8, 16) for prompt in range(4)])
    settings = SamplingSettings(16, 1.0, frozenset())
    groups = TorchSampler(base).sample(prompts, policy.adapters([]), settings, uniforms).groups
    sampled = torch.tensor([x for group in groups for c in group for x in c.logprobs])
    with torch.no_grad(), applied(base.model, policy.adapters([])):
        trained = token_logprobs(base, [(p, [c.ids for c in g]) for p, g in zip(prompts, groups, strict=True)])
    return (sampled - trained).abs()


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "mean", "most"), [("float32", 2e-5, 1e-4), ("bfloat16", 0.1, 1.0)])
def test_smollm2_is_trained_on_what_it_sampled(
    dtype: str, mean: float, most: float, record_property: Callable[[str, object], None]
) -> None:
    difference = sampled_against_policy(load_base_model("smollm2-135m", dtype=dtype))
    quantiles = torch.quantile(difference, torch.tensor([0.5, 0.9, 0.99])).tolist()
    print(f"{dtype}: mean {difference.mean():.2g}, quantiles .5 .9 .99 {quantiles}, most {difference.max():.2g}")
    record_property("quantiles", quantiles)
    assert float(difference.mean()) < mean and float(difference.max()) < most
