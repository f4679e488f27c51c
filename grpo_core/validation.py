"""Between pydantic's errors and ours: one way to refuse a value, one way to say so.

Validators raise `refusal(...)`; `config_error` turns whatever pydantic collected into one
`ConfigError` that names the field, the value and what to do.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ValidationError, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from grpo_core.errors import ConfigError

_TYPE = "refused"


def refusal(error: ConfigError) -> PydanticCustomError:
    """A `ConfigError` in the form that pydantic validators raise; `config_error` gives it back."""
    context = {"text": error.message, "field": error.field or "", "hint": error.hint or "", "code": error.code}
    return PydanticCustomError(_TYPE, "{text}", context)


def config_error(error: ValidationError, prefix: str = "") -> ConfigError:
    """The first problem of a pydantic error as a `ConfigError`.

    Args:
        prefix: path of the validated object within the whole request, if it is a part of one.
    """
    first = error.errors()[0]
    context = first.get("ctx", {})
    parts = (prefix, *map(str, first["loc"]), context.get("field", "") if first["type"] == _TYPE else "")
    field = ".".join(part for part in parts if part) or None
    others = sorted({".".join(map(str, other["loc"])) or "a conflict" for other in error.errors()[1:]})
    more = f"; also wrong: {', '.join(others)}" if others else ""
    match first["type"]:
        case "refused":
            return ConfigError(context["text"] + more, field=field, hint=context["hint"] or None, code=context["code"])
        case "extra_forbidden":
            hint = "check the spelling; unknown fields are never ignored"
            return ConfigError(f"unknown field{more}", field=field, hint=hint)
        case "missing":
            return ConfigError(f"a value is required{more}", field=field)
        case _:
            return ConfigError(f"{first['msg']}, got {first['input']!r}{more}", field=field)


class StrictNumbers(BaseModel):
    """A model whose number fields take numbers: true is no 1, although Python and pydantic take it for one."""

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation is not bool:
            raise refusal(ConfigError(f"{value} is no number", hint="true and false are for switches only"))
        return value
