"""Environments by name: entry points of the group ``grpo_lab.environments``, our own included."""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points
from typing import Any

from pydantic import ValidationError

from grpo_core.environments.base import Environment
from grpo_core.environments.niah import Niah
from grpo_core.errors import ConfigError
from grpo_core.validation import config_error

GROUP = "grpo_lab.environments"


def environment_names() -> list[str]:
    """Names of all installed environments, sorted."""
    return sorted({Niah.name, *(entry.name for entry in entry_points(group=GROUP))})


@cache
def environment_class(name: str) -> type[Environment]:
    """The class behind an environment's name.

    Raises:
        ConfigError: when no installed package offers that name, or what it offers is not an environment.
    """
    if name == Niah.name:
        return Niah
    for entry in entry_points(group=GROUP):
        if entry.name == name:
            try:
                loaded = entry.load()
            except Exception as error:  # foreign code, run at import
                message = f"{name!r} cannot be loaded from {entry.value!r}: {type(error).__name__}: {error}"
                raise ConfigError(message, field="environment", hint="mend or reinstall its package") from error
            if not (isinstance(loaded, type) and issubclass(loaded, Environment)):
                raise ConfigError(
                    f"{name!r}: its entry point {entry.value!r} is not a subclass of Environment",
                    field="environment",
                )
            return loaded
    raise ConfigError(
        f"{name!r} is not installed",
        field="environment",
        hint=f"installed: {', '.join(environment_names())}",
        code="UNKNOWN_ENVIRONMENT",
    )


def make_environment(name: str, options: dict[str, Any]) -> Environment:
    """Build an environment with validated options.

    Raises:
        ConfigError: for an unknown name, an unknown option, or a value outside its bounds.
    """
    environment = environment_class(name)
    try:
        return environment(environment.Options.model_validate(options))
    except ValidationError as error:
        raise config_error(error, prefix="environment_options") from None
