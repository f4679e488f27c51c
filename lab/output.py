"""What a command answers, and the only place that writes to standard output.

Standard output carries the answer alone: one JSON document, or text for people. While a command works,
whatever it or a library prints goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console, RenderableType

from grpo_core.errors import LabError


@dataclass(frozen=True)
class Answer:
    """The end of a command.

    Attributes:
        document: the JSON document.
        text: makes the same for people, only when asked for.
        exit_code: status of the process.
    """

    document: dict[str, Any]
    text: Callable[[], list[RenderableType]] = list
    exit_code: int = 0


def refusal(error: LabError) -> Answer:
    """The answer of a command that ends with an error raised on purpose."""
    return Answer({"error": error.as_dict()}, exit_code=error.exit_code)


def write(answer: Answer, as_json: bool) -> None:
    """Print an answer; an error in text form goes to standard error, in one line."""
    if as_json:
        print(json.dumps(answer.document, indent=2, ensure_ascii=False))
    elif "error" in answer.document:
        print(f"error: {_one_line(answer.document['error'])}", file=sys.stderr)
    else:
        console = Console(soft_wrap=True, highlight=False)
        for part in answer.text():
            console.print(part, markup=False)
    sys.stdout.flush()


def _one_line(error: dict[str, str | None]) -> str:
    field_name = f"{error['field']}: " if error["field"] else ""
    hint = f" ({error['hint']})" if error["hint"] else ""
    return " ".join(f"{field_name}{error['message']}{hint}".split())


@contextmanager
def stdout_kept_clean() -> Iterator[None]:
    """Send everything printed within, by Python or by libraries and child processes, to standard error."""
    sys.stdout.flush()
    kept, python_stdout = os.dup(1), sys.stdout
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stdout = python_stdout
        os.dup2(kept, 1)
        os.close(kept)
