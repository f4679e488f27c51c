"""Find and read the evaluation documents that a command names."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from grpo_core.errors import ConfigError, NotFoundError
from grpo_core.files import read_text
from grpo_core.results import EVALUATION_FILE, EvaluationResult
from tasks.places import inside, locate


def read_evaluation(place: str) -> EvaluationResult:
    """The evaluation in a file, in a folder, or of a job id.

    Raises:
        NotFoundError: there is none.
        ConfigError: the file is not an evaluation document with its items.
    """
    url = place if Path(place).expanduser().exists() else locate(place)
    if not url.endswith(".json"):
        url = inside(url, EVALUATION_FILE)
    try:
        return EvaluationResult.model_validate_json(read_text(url))
    except NotFoundError:
        raise NotFoundError(
            f"there is no evaluation at {place!r}",
            hint="give an evaluation.json, or the folder or job id that holds one",
        ) from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"{place!r} is no evaluation document: {where}: {first['msg']}", hint="it must hold per_task"
        ) from None
