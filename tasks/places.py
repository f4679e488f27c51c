"""Where a job's files live: the artifact root under the lab's home, and what a name of a place means.

No Prefect, no MLflow and no torch here: the doors read this before anything heavy is loaded.
"""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path
from typing import TypeVar
from uuid import UUID

from grpo_core.config import Config
from grpo_core.home import lab_home

# In a folder of their own: a training run keeps a result.json of its own in the folder of its checkpoints.
CONFIG = "job/config.json"
RESULT = "job/result.json"
PROCESS = "job/process.json"

JOB_TAG = "lab"
"""On every flow run that is a job, beside its kind."""

CANCEL_TAG = "lab:cancel"
"""On the flow run of a job that is to stop."""

# Fields that name a place where runs keep their files, and those that name a user's own.
RUN_PLACES = ("checkpoint_dir", "init_checkpoint_dir", "init_adapter_dir")
OWN_PLACES = ("dataset", "model_dir")

C = TypeVar("C", bound=Config)


def artifact_root() -> Path:
    """Where run folders are made."""
    return lab_home() / "artifacts"


def job_id(prefix: str, created: datetime, flow_run_id: UUID) -> str:
    """The id of the job that a flow run is: ``<prefix>-<unix seconds>-<8 hex>``; a retried flow run keeps it."""
    return f"{prefix}-{int(created.timestamp())}-{flow_run_id.hex[:8]}"


def run_folder(job_id: str) -> str:
    """The folder of one job's config and result, and of its checkpoints unless the config names another."""
    return str(artifact_root() / job_id)


def locate(place: str) -> str:
    """The absolute path or URL behind the name of a place where runs keep their files.

    A job id or a relative path lies under the artifact root; ``./`` and ``../`` start at the current
    directory, as in a shell; absolute paths, ``~`` and URLs mean themselves.
    """
    if "://" in place:
        return place
    if not Path(place).expanduser().is_absolute() and place.split("/")[0] not in (".", ".."):
        return os.path.abspath(artifact_root() / place)
    return absolute(place)


def absolute(place: str) -> str:
    """The absolute path or URL of a user's own file; a relative path starts at the current directory."""
    return place if "://" in place else os.path.abspath(Path(place).expanduser())


def located(config: C) -> C:
    """The config with every place that it names made absolute, so that it means the same in any process."""
    update: dict[str, object] = {name: located(value) for name, value in config if isinstance(value, Config)}
    for names, meaning in ((RUN_PLACES, locate), (OWN_PLACES, absolute)):
        update |= {name: meaning(value) for name in names if (value := getattr(config, name, None)) is not None}
    return config.model_copy(update=update)


def inside(folder: str, *names: str) -> str:
    """A path or URL below `folder`."""
    return "/".join((folder.rstrip("/"), *names))
