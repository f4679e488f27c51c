"""Problem -> chat messages -> token ids: the only place that renders a template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from grpo_core.environments.base import Problem
from grpo_core.errors import ConfigError
from grpo_core.models import BaseModel

Messages = list[dict[str, str]]


def document_and_question(problem: Problem) -> Messages:
    """The messages of a policy that reads the document in its context."""
    content = f"{problem.document}\n\n{problem.question}" if problem.document else problem.question
    return [{"role": "user", "content": content}]


class Chat:
    """Renders messages and decodes completions for one base model.

    Attributes:
        end_of_turn: id of the token that ends an assistant turn; it is trained and sampled.
        stop_ids: ids after which a completion is finished (the end of turn among them).
    """

    def __init__(self, base: BaseModel):
        self._tokenizer = base.tokenizer
        self._options = dict(base.family.chat_template_options)
        self._context_limit = base.context_limit
        if self._tokenizer.eos_token_id is None:
            raise ConfigError(
                f"the tokenizer of {base.source!r} has no end-of-turn token (eos_token)", field="model_dir"
            )
        self.end_of_turn: int = cast(int, self._tokenizer.eos_token_id)
        generation = base.model.generation_config
        configured: Any = (generation.eos_token_id if generation is not None else None) or []
        self.stop_ids = frozenset([self.end_of_turn, *([configured] if isinstance(configured, int) else configured)])

    def prompt_ids(self, messages: Messages, max_new_tokens: int) -> list[int]:
        """Token ids of the messages, ending where the assistant begins to speak.

        The template alone writes special tokens, so a BOS appears exactly as often as the template says.

        Raises:
            ConfigError: prompt and completion budget do not fit into the context.
        """
        rendered: Any = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False, **self._options
        )
        ids = [int(token) for token in rendered]
        if len(ids) + max_new_tokens > self._context_limit:
            needed = f"{len(ids)} prompt tokens and {max_new_tokens} new ones"
            raise ConfigError(
                f"{needed} exceed the context of {self._context_limit}",
                field="environment_options",
                hint="make the documents shorter (for niah: max_blocks, num_keys) or max_new_tokens smaller",
                code="CONTEXT_TOO_LONG",
            )
        return ids

    def completion_ids(self, text: str) -> list[int]:
        """Token ids of a reference completion, its end of turn included."""
        return [*self._tokenizer.encode(text, add_special_tokens=False), self.end_of_turn]

    def text(self, completion: Sequence[int]) -> str:
        """The text of a completion, its closing stop token left out."""
        ids = completion[:-1] if completion and completion[-1] in self.stop_ids else completion
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))
