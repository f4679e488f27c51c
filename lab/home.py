"""The lab's home: where Prefect and MLflow keep their things when nobody said otherwise.

`prepare` only sets environment variables that are not set, so a user's own Prefect or MLflow is used
exactly when their environment says so. It must run before either is imported, and imports neither.
"""

from __future__ import annotations

import os

from grpo_core.home import lab_home
from tasks.tracking import tracking_uri


def prepare(verbose: bool = False) -> None:
    """Make the home and point Prefect and MLflow at it, telemetry off.

    Args:
        verbose: let Prefect, MLflow and transformers write what they like to standard error, not only warnings.
    """
    home = lab_home()
    defaults = {
        "LAB_HOME": str(home),
        "PREFECT_HOME": str(home / "prefect"),
        "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "true",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_RESULTS_DEFAULT_SERIALIZER": "json",
        "PREFECT_LOGGING_EXTRA_LOGGERS": "grpo_core,tasks",
        "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "INFO" if verbose else "WARNING",
        # A busy machine needs longer than the default 20 s to start the API.
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
        "MLFLOW_TRACKING_URI": tracking_uri(),
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "1",
    }
    if not verbose:  # the job's own progress is what people watch
        defaults |= {"MLFLOW_LOGGING_LEVEL": "WARNING", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    for folder in (home / "artifacts", home / "mlflow"):
        folder.mkdir(parents=True, exist_ok=True)
