"""The least that a GRPO step has to compute, and the fastest that this machine multiplies matrices.

Linear layers cost 2 operations per weight and token. A prompt is counted once per group, wherever it is computed:

    prefill     the distinct prompts
    decode      new_tokens - 1 tokens of each completion (the last one is never fed back)
    reference   a forward pass of the packed rows: a prompt once + (new_tokens - 1) of each of its completions
    policy      a forward pass of the packed rows, and one backward pass to their inputs (the weights are frozen;
                the adapters' own operations are left out)

The LM head counts on completion tokens, in decode, reference, policy forward and backward. Attention is given by
itself: two products (queries x keys, weights x values) over the tokens that may be seen; four in the backward pass.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from workload import Workload


def step_operations(config: Any, work: Workload) -> dict[str, float]:
    """Operations of one step in GFLOP: ``linear``, ``lm_head``, ``attention``.

    Args:
        config: the model's transformers config.
    """
    hidden, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    # q and o, k and v, gate and up and down
    weights = layers * (2 * hidden * heads * size + 2 * hidden * kv_heads * size + 3 * hidden * inner)
    fed = work.new_tokens - 1
    prefill = work.prompts_per_step * work.prompt_tokens
    decode = work.rows * fed
    packed = prefill + decode
    linear = 2 * weights * (prefill + decode + 3 * packed)
    head = 4 * 2 * hidden * config.vocab_size * work.rows * work.new_tokens

    # pairs of a query and a key that it sees, over all rows of a step
    prompt_pairs = work.prompts_per_step * work.prompt_tokens * (work.prompt_tokens + 1) / 2
    completion_pairs = work.rows * (fed * work.prompt_tokens + fed * (fed + 1) / 2)
    pairs = prompt_pairs + completion_pairs
    # rollout, reference and policy forward once each, backward twice a forward
    attention = 2 * 2 * layers * heads * size * pairs * (1 + 1 + 1 + 2)
    return {"linear": linear / 1e9, "lm_head": head / 1e9, "attention": attention / 1e9}


def peak_gflops(size: int = 2048, tries: int = 30) -> float:
    """The best bfloat16 matrix product of size^3 among some tries, in GFLOP/s."""
    left, right = torch.randn(2, size, size).to(torch.bfloat16)
    best = float("inf")
    for _ in range(tries):
        started = time.perf_counter()
        torch.mm(left, right)
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best / 1e9
