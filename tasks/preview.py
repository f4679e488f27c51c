"""The first stage of a pipeline: its plan, kept beside its result."""

from __future__ import annotations

from typing import Any

from prefect import task

from grpo_core.compute import preview as planning
from grpo_core.config import PipelineConfig
from tasks.settings import ONCE


@task(name="preview", **ONCE)
def preview(config: dict[str, Any]) -> dict[str, Any]:
    """The preview document of a pipeline."""
    return planning.preview(PipelineConfig.parse(config)).document()
