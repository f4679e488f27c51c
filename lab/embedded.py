"""Run a job's flow in this process, on Prefect's embedded API. Prefect is imported only once a job starts."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

from grpo_core.config import Config
from grpo_core.errors import LabError
from grpo_core.home import lab_home
from grpo_core.progress import StopNow
from lab import home
from lab.progress import TerminalProgress

if TYPE_CHECKING:
    from prefect import Flow


def run(flow_name: str, config: Config, verbose: bool = False) -> dict[str, Any]:
    """Run a flow to its end and return its result document, whose `status` says whether it was cancelled.

    Args:
        flow_name: see `load_flow`.

    Raises:
        LabError: the job was refused or failed on purpose.
        Exception: whatever else ended the job.
    """
    home.prepare(verbose)
    _tell_what_starts()
    flow = load_flow(flow_name)
    from flows.jobs import outcome
    from tasks.monitoring import watching

    _start_api()
    _quiet_prefect()
    with TerminalProgress() as progress, watching(progress):
        state = flow(config, return_state=True)
    return outcome(state)


def load_flow(name: str) -> Flow[..., Any]:
    """The flow of that name, which is also its module's in `flows`. Imports Prefect."""
    return getattr(import_module(f"flows.{name}"), name)


def _tell_what_starts() -> None:
    if url := os.environ.get("PREFECT_API_URL"):
        print(f"using the Prefect API at {url}", file=sys.stderr)
        return
    first = not (lab_home() / "prefect" / "prefect.db").exists()
    print(f"starting the embedded Prefect API (about {11 if first else 6} s)", file=sys.stderr)


def _start_api() -> None:
    """Start the embedded API out of Ctrl-C's reach.

    Ctrl-C goes to every process of the terminal's group. The API must outlive it, or the job could not
    report its end; a process started while the signal is blocked inherits the block.
    """
    from prefect.client.orchestration import get_client

    with _interrupts_held():
        get_client(sync_client=True)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _quiet_prefect() -> None:
    from prefect.logging.configuration import setup_logging

    setup_logging()
    logging.getLogger("grpo_core").setLevel(logging.INFO)
    for handler in logging.getLogger().handlers:
        handler.addFilter(_said_once)


def _said_once(record: logging.LogRecord) -> bool:
    """Whether a log line belongs on the terminal: the door itself shows notices, and how a job ends."""
    if getattr(record, "notice", False):
        return False
    if record.name.startswith("prefect.flow_runs"):
        return record.levelno < logging.ERROR
    if record.name.startswith("prefect.task_runs") and record.levelno >= logging.ERROR:
        error = record.exc_info[1] if record.exc_info else None
        return error is not None and not isinstance(error, LabError | StopNow)
    return True
