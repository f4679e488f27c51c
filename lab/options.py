"""Command-line flags, made from the configs: every field of a config is a flag, and there is no second list.

A flag only carries text; the config judges it, so that a wrong value is refused with the same words here
as in a file or over HTTP.
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import field, fields, is_dataclass, make_dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, get_args

from cyclopts import Group, Parameter
from pydantic.fields import FieldInfo

from grpo_core.config import CommonConfig, ComputeConfig, Config
from grpo_core.environments.niah import Niah
from grpo_core.errors import ConfigError, NotFoundError

# Flags whose name is not the field's. Names without dashes, because a section's name may come before them.
NAMES = {
    "family": ("family", "-f"),
    "checkpoint_dir": ("checkpoint-dir", "-c"),
    "num_tasks": ("tasks", "num-tasks"),
    "offer": ("compute-offer",),
    "provider": ("compute-provider",),
}
ENVIRONMENT_OPTIONS = "environment_options"
ENV_HELP = "Option of the environment, KEY=VALUE; may be repeated. VALUE is JSON, or else text."


@cache
def flags_of(config: type[Config], section: str = "") -> type:
    """A dataclass with one optional flag per field of `config`; None means that the flag was not given.

    Args:
        section: field of the whole config that this one is a part of; its flags are then ``--section.name``.
    """
    group = {"group": _group(section)} if section else {}
    made: list[tuple[str, Any, Any]] = []
    # What every job has comes first; the sort is stable.
    for name, info in sorted(config.model_fields.items(), key=lambda item: item[0] not in CommonConfig.model_fields):
        if isinstance(info.annotation, type) and issubclass(info.annotation, Config):
            prefix = "*" if info.annotation is ComputeConfig else name
            made.append(_flag(name, flags_of(info.annotation, name), Parameter(name=prefix)))
        elif name == ENVIRONMENT_OPTIONS:
            made.append(_flag("env", list[str], Parameter(name="env", help=ENV_HELP, negative=())))
        else:
            made.append(_value_flag(name, info, **group))
    if ENVIRONMENT_OPTIONS in config.model_fields:
        niah = _group("niah environment")
        options = Niah.Options.model_fields.items()
        made += [_value_flag(name, info, group=niah) for name, info in options if name not in config.model_fields]
    return make_dataclass(f"{config.__name__}Flags", made, kw_only=True, namespace={"__module__": __name__})


def _value_flag(name: str, info: FieldInfo, **looks: Any) -> tuple[str, Any, Any]:
    """A flag of one value. All but switches are text here: the config converts and judges them."""
    kind = _plain(info.annotation)
    choices = get_args(kind)  # of a Literal
    shown = [f"[choices: {', '.join(map(str, choices))}]"] if choices else []
    shown += [f"[default: {info.default}]"] if not info.is_required() and info.default is not None else []
    parameter = Parameter(
        name=NAMES.get(name, (name.replace("_", "-"),)),
        help=" ".join([info.description or "", *shown]),
        metavar="CHOICE" if choices else kind.__name__.upper(),
        show_default=False,
        **looks,
    )
    return _flag(name, bool if kind is bool else str, parameter)


@cache  # two groups of one name cannot be in one command
def _group(name: str) -> Group:
    return Group(name[0].upper() + name[1:], sort_key=1)


def _flag(name: str, kind: Any, parameter: Parameter) -> tuple[str, Any, Any]:
    return name, Annotated[kind | None, parameter], field(default=None)


def _plain(annotation: Any) -> Any:
    """`X | None` as X."""
    kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
    return kinds[0] if type(None) in get_args(annotation) and len(kinds) == 1 else annotation


def chosen(flags: Any, config: type[Config]) -> dict[str, Any]:
    """The values that flags were given for, as a request for `config`.

    Raises:
        ConfigError: `--env` without an equals sign, or an option given twice.
    """
    request: dict[str, Any] = {}
    options: dict[str, Any] = {}
    named = dict(_env(item) for item in getattr(flags, "env", None) or [])
    for name in named:
        if getattr(flags, name, None) is not None:
            hint = "leave one of them out"
            raise ConfigError(f"given twice, as --env {name}=… and as a flag", field=name, hint=hint)
    for each in fields(flags):
        value = getattr(flags, each.name)
        if each.name == "env":
            options.update(named)
        elif is_dataclass(value):
            nested = config.model_fields[each.name].annotation
            assert isinstance(nested, type) and issubclass(nested, Config)
            if inner := chosen(value, nested):
                request[each.name] = inner
        elif value is not None and each.name in config.model_fields:
            request[each.name] = _number(value, config.model_fields[each.name])
        elif value is not None:
            options[each.name] = value
    return {**request, ENVIRONMENT_OPTIONS: options} if options else request


def _number(value: Any, info: FieldInfo) -> Any:
    """Text as the number that a field takes, or as it is: then the config refuses it by name."""
    kind = _plain(info.annotation)
    if kind not in (int, float):
        return value
    try:
        return kind(value)
    except ValueError:
        return value


def _env(item: str) -> tuple[str, Any]:
    key, equals, text = item.partition("=")
    if not equals or not key:
        raise ConfigError(f"{item!r} is not KEY=VALUE", field="env", hint="write --env min_blocks=2")
    try:
        return key, json.loads(text)
    except json.JSONDecodeError:
        return key, text


def read_file(path: Path) -> dict[str, Any]:
    """A request from a TOML, YAML or JSON file.

    Raises:
        NotFoundError: there is no such file.
        ConfigError: it is not what its name says, or not a table of fields.
    """
    try:
        text = path.expanduser().read_text()
    except OSError as error:
        raise NotFoundError(f"{str(path)!r} cannot be read: {error.strerror}", field="config") from None
    try:
        content = _parsed(path, text)
    except ValueError as error:
        raise ConfigError(f"{str(path)!r} is not {path.suffix.lstrip('.').upper()}: {error}", field="config") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{str(path)!r} holds no table of fields", field="config")
    return content


def _parsed(path: Path, text: str) -> Any:
    match path.suffix:
        case ".toml":
            return tomllib.loads(text)
        case ".json":
            return json.loads(text)
        case ".yaml" | ".yml":
            import yaml

            try:
                return yaml.safe_load(text)
            except yaml.YAMLError as error:
                raise ValueError(" ".join(str(error).split())) from None
        case _:
            raise ConfigError(f"{str(path)!r}: unknown kind of file", field="config", hint="use .toml, .yaml or .json")


def merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """`above` laid over `below`, section by section.

    Raises:
        ConfigError: `below` has a plain value where `above` has a section.
    """
    result = dict(below)
    for name, value in above.items():
        under = result.get(name)
        if isinstance(value, dict) and under is not None:
            if not isinstance(under, dict):
                raise ConfigError(f"{under!r} is no table of fields", field=name, hint="mend the config file")
            value = merged(under, value)
        result[name] = value
    return result
