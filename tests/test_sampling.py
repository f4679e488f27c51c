"""The sampler against the model's own forward and against closed forms."""

import numpy as np
import pytest
import torch
from loops import FAMILY

from grpo_core.engines.base import Engine
from grpo_core.engines.generic import GenericEngine
from grpo_core.engines.native import NativeEngine
from grpo_core.logprobs import token_logprobs
from grpo_core.models import load_base_model
from grpo_core.policies.adapters import NO_ADAPTER, applied
from grpo_core.policies.peft_lora import PeftLoraPolicy
from grpo_core.sampling import SamplingSettings, TorchSampler, _draw, addressed_uniforms

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [50, 51, 52], [90, 91, 92, 93, 94]]
FREE = SamplingSettings(max_new_tokens=6, temperature=0.8, stop_ids=frozenset())


def uniforms(prompts: int, group: int, tokens: int = 6) -> np.ndarray:
    return np.stack([addressed_uniforms(0, 1, prompt, 0, group, tokens) for prompt in range(prompts)])


@pytest.mark.parametrize("tiny_model_dir", ["llama", "qwen3", "mistral"], indirect=True)
@pytest.mark.parametrize("engine", [NativeEngine, GenericEngine])
def test_sampled_logprobs_are_the_policys_own(tiny_model_dir: str, engine: type[Engine]) -> None:
    family = FAMILY[tiny_model_dir.rpartition("/")[2]]
    base = load_base_model(family, tiny_model_dir, "cpu", "float32")
    policy = PeftLoraPolicy.create(base, 4, 8, seed=0)
    for tensor in policy.trainable_parameters().values():
        tensor.data.normal_(0, 0.2, generator=torch.Generator().manual_seed(3))
    # stop ids make rows end early and leave the batch
    settings = SamplingSettings(6, 0.8, frozenset(range(0, 258, 4)))
    base.__dict__["engine"] = engine(base.model)
    groups = TorchSampler(base).sample(PROMPTS, policy.adapters([]), settings, uniforms(3, 4)).groups
    lengths = [len(completion.ids) for group in groups for completion in group]
    assert len(lengths) == 12 and min(lengths) < max(lengths)
    completed = [(p, [c.ids for c in group]) for p, group in zip(PROMPTS, groups, strict=True)]
    sampled = torch.tensor([x for group in groups for c in group for x in c.logprobs])
    with torch.no_grad(), applied(base.model, policy.adapters([])):
        recomputed = token_logprobs(base, completed, temperature=0.8)
        # forgetting the temperature in the loss would show as a first ratio far from 1
        untempered = token_logprobs(base, completed, temperature=1.0)
    assert torch.allclose(sampled, recomputed, atol=1e-5)
    assert float((untempered - recomputed).abs().max()) > 1e-3
    with torch.no_grad():
        bare = token_logprobs(base, completed, temperature=0.8)
    assert float((bare - recomputed).abs().max()) > 1e-3  # rollouts come from the adapter, not from the base


def test_a_group_does_not_depend_on_its_neighbours(tiny_model_dir: str) -> None:
    base = load_base_model("smollm2-135m", tiny_model_dir, "cpu", "float32")
    sampler = TorchSampler(base)
    together = sampler.sample(PROMPTS, NO_ADAPTER, FREE, uniforms(3, 4)).groups
    for number, prompt in enumerate(PROMPTS):
        alone = sampler.sample([prompt], NO_ADAPTER, FREE, uniforms(3, 4)[number : number + 1]).groups
        assert [c.ids for c in alone[0]] == [c.ids for c in together[number]]


def test_greedy_equals_transformers_generate(tiny_model_dir: str) -> None:
    base = load_base_model("smollm2-135m", tiny_model_dir, "cpu", "float32")
    settings = SamplingSettings(6, 0.0, frozenset({base.tokenizer.eos_token_id}))
    ours = TorchSampler(base).sample(PROMPTS, NO_ADAPTER, settings, uniforms(3, 1)).groups
    for prompt, (completion,) in zip(PROMPTS, ours, strict=True):
        theirs = base.model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False)[0, len(prompt) :]
        assert completion.ids == theirs.tolist()


def test_stop_token_is_kept_and_ends_the_completion(tiny_model_dir: str) -> None:
    base = load_base_model("smollm2-135m", tiny_model_dir, "cpu", "float32")
    settings = SamplingSettings(6, 1.0, frozenset(range(258)))
    for group in TorchSampler(base).sample(PROMPTS, NO_ADAPTER, settings, uniforms(3, 2)).groups:
        assert [(len(c.ids), c.truncated) for c in group] == [(1, False), (1, False)]
    free = TorchSampler(base).sample(PROMPTS, NO_ADAPTER, FREE, uniforms(3, 2)).groups
    assert all(len(c.ids) == 6 and c.truncated for group in free for c in group)


def test_uniforms_depend_on_their_address_alone() -> None:
    first = addressed_uniforms(seed=1, step=2, prompt=3, attempt=0, group=4, tokens=5)
    assert first.shape == (4, 5)
    assert (addressed_uniforms(1, 2, 3, 0, 4, 50)[:, :5] == first).all()  # a larger budget, the same beginning
    assert (addressed_uniforms(1, 2, 3, 0, 2, 5) == first[:2]).all()  # a smaller group, the same completions
    others = [(9, 2, 3, 0), (1, 9, 3, 0), (1, 2, 9, 0), (1, 2, 3, 9)]
    assert all((addressed_uniforms(*address, 4, 5) != first).all() for address in others)
    assert len(np.unique(first)) == 20 and first.min() >= 0 and first.max() < 1


def test_drawing_follows_the_distribution() -> None:
    # probabilities .5, .3, .2: their cumulative bounds decide
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log().expand(6, -1)
    tokens, logprobs, entropies = _draw(logits, 1.0, np.array([0.0, 0.49, 0.51, 0.79, 0.81, 0.999999]))
    assert tokens.tolist() == [0, 0, 1, 1, 2, 2]
    assert logprobs.exp().tolist() == pytest.approx([0.5, 0.5, 0.3, 0.3, 0.2, 0.2], abs=1e-6)
    # -sum p log p = 1.0297
    assert entropies.tolist() == pytest.approx([1.029653] * 6, abs=1e-5)


def test_temperature_sharpens_the_draw() -> None:
    # at temperature 0.5 the odds .5 : .3 : .2 become .25 : .09 : .04 of .38
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    _, logprobs, _ = _draw(logits, 0.5, np.array([0.0]))
    assert float(logprobs.exp()) == pytest.approx(0.25 / 0.38, abs=1e-6)


def test_impossible_tokens_are_never_drawn() -> None:
    logits = torch.tensor([[float("-inf"), 0.0, float("-inf")]]).expand(3, -1)
    tokens, _, _ = _draw(logits.clamp(min=-1e4), 1.0, np.array([0.0, 0.5, 1 - 2**-53]))
    assert tokens.tolist() == [1, 1, 1]
