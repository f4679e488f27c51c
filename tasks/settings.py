"""What all tasks of this project declare: when a stage is tried again, and that nothing of it is cached.

A stage is tried again after trouble that starting over may cure (a lost connection), never
after an error raised on purpose. Training resumes from its last checkpoint and an evaluation behind its
last batch, so a second try costs little.
"""

from __future__ import annotations

from typing import Any

from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.tasks import Task, exponential_backoff

from grpo_core.errors import is_retryable


def is_transient(task: Task[..., Any], task_run: TaskRun, state: State[Any]) -> bool:
    """Whether a failed task run is worth another try (Prefect's `retry_condition_fn`)."""
    try:
        state.result()
    except Exception as error:
        return is_retryable(error)
    return False


# A cached stage could answer for a checkpoint folder that no longer exists; the folder itself is the memory.
ONCE: dict[str, Any] = {
    "cache_policy": NO_CACHE,
    "persist_result": False,
    "result_serializer": "json",
    "log_prints": False,
}

STAGE: dict[str, Any] = {
    **ONCE,
    "retries": 2,
    "retry_delay_seconds": exponential_backoff(backoff_factor=2),
    "retry_jitter_factor": 0.5,
    "retry_condition_fn": is_transient,
}
