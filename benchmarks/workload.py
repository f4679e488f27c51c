"""What both systems are given: prompts of an exact length, a deterministic reward, and one GRPO configuration."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from grpo_core.environments.base import Draws, Environment, EnvironmentOptions, Problem, Score, Split

TEMPLATE_TOKENS = 30
"""Tokens of SmolLM2's chat template around a user message: system prompt, markers, generation prompt."""

# Each is one token of SmolLM2, at the start of a message and after a space.
_WORDS = (
    "time people way day man thing woman life child world school state family student group country problem "
    "hand part place case week company system program question work government number night point home water "
    "room mother area money story fact month lot right study book eye job word business issue side kind head "
    "house service friend father power hour game line end member law car city community name president team "
    "minute idea body information back parent face others level office door health person art war history "
    "party result change morning reason research moment air force education"
)
WORDS = _WORDS.split()


@dataclass(frozen=True)
class Workload:
    """One configuration to be measured. Completions are exactly `new_tokens` long, prompts `prompt_tokens`."""

    prompts_per_step: int = 4
    group_size: int = 8
    prompt_tokens: int = 254
    new_tokens: int = 16
    kl_beta: float = 0.04
    lora_rank: int = 16
    steps: int = 6

    @property
    def rows(self) -> int:
        """Completions of a step."""
        return self.prompts_per_step * self.group_size

    @property
    def tokens(self) -> int:
        """Tokens of a step's completions, each counted with its prompt."""
        return self.rows * (self.prompt_tokens + self.new_tokens)

    def config(self) -> dict[str, Any]:
        """The fields of `GRPOConfig`; the TRL worker reads the same ones."""
        return {
            "family": "smollm2-135m",
            "environment": "fixed-length",
            "environment_options": {"words": self.prompt_tokens - TEMPLATE_TOKENS},
            "policy": "peft-lora",
            "lora_rank": self.lora_rank,
            "prompts": self.prompts_per_step * self.steps,
            "prompts_per_step": self.prompts_per_step,
            "group_size": self.group_size,
            "max_new_tokens": self.new_tokens,
            "kl_beta": self.kl_beta,
        }


class FixedLengthOptions(EnvironmentOptions):
    """How long a prompt is."""

    words: int = Field(default=100, ge=1)


class FixedLength(Environment):
    """Words to read and a reward that is a hash of the completion: uniform in [0, 1), different within a group."""

    name = "fixed-length"
    description = "Prompts of an exact length with a hash as reward, for measurements."
    Options = FixedLengthOptions

    def problem(self, seed: int, split: Split, index: int, stream: str = "") -> Problem:
        draws = Draws(self.name, seed, split, stream, index)
        question = " ".join(draws.choice(WORDS) for _ in range(self.options.words))
        return Problem(f"{split}/{stream}/{index}", split, seed, index, None, question, "")

    def score(self, problem: Problem, completion: str) -> Score:
        digest = hashlib.sha256(completion.encode()).digest()
        return Score(int.from_bytes(digest[:4], "big") / 2**32)


def check_length(tokenizer: Any, messages: list[dict[str, str]], config: dict[str, Any]) -> None:
    """Refuse a fixed-length prompt whose rendered length is not the one that was asked for.

    Raises:
        ValueError: the tokenizer splits a word, or its template has another length.
    """
    wanted = config["environment_options"]["words"] + TEMPLATE_TOKENS
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    if len(ids) != wanted:
        raise ValueError(f"the prompt has {len(ids)} tokens, expected {wanted}: see WORDS and TEMPLATE_TOKENS")
