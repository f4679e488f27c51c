"""Where a job's files live: the artifact root under the lab's home, and the small documents in a run folder.

No Prefect, no MLflow and no torch here: the doors read this before anything heavy is loaded.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, TypeVar

import fsspec

from grpo_core.checkpoints import read_text
from grpo_core.config import Config
from grpo_core.home import lab_home

# In a folder of their own: a training run keeps a result.json of its own in the folder of its checkpoints.
CONFIG = "job/config.json"
RESULT = "job/result.json"

# Fields that name a place where runs keep their files.
PLACES = ("checkpoint_dir", "init_checkpoint_dir", "init_adapter_dir")

C = TypeVar("C", bound=Config)


def artifact_root() -> Path:
    """Where run folders are made."""
    return lab_home() / "artifacts"


def run_folder(job_id: str) -> str:
    """The folder of one job's config and result, and of its checkpoints unless the config names another."""
    return str(artifact_root() / job_id)


def locate(place: str) -> str:
    """The absolute path or URL behind what a user wrote.

    A job id or a relative path lies under the artifact root; ``./`` and ``../`` start at the current
    directory, as in a shell; absolute paths, ``~`` and URLs mean themselves.
    """
    if "://" in place:
        return place
    path = Path(place).expanduser()
    if not path.is_absolute() and place.split("/")[0] not in (".", ".."):
        path = artifact_root() / path
    return os.path.abspath(path)


def located(config: C) -> C:
    """The config with every place that it names made absolute, so that it means the same in any process."""
    named = {name: value for name in PLACES if (value := getattr(config, name, None)) is not None}
    sections = {name: located(value) for name, value in config if isinstance(value, Config)}
    return config.model_copy(update={**{name: locate(value) for name, value in named.items()}, **sections})


def inside(folder: str, *names: str) -> str:
    """A path or URL below `folder`."""
    return "/".join((folder.rstrip("/"), *names))


def write_json(url: str, document: dict[str, Any]) -> None:
    """Write one JSON document, making its folder."""
    filesystem, path = fsspec.core.url_to_fs(url)
    filesystem.makedirs(path.rsplit("/", 1)[0], exist_ok=True)
    filesystem.pipe_file(path, json.dumps(document, indent=2, ensure_ascii=False).encode())


def read_json(url: str) -> dict[str, Any]:
    """The JSON document at `url`.

    Raises:
        NotFoundError: there is no such file.
    """
    return json.loads(read_text(url))
