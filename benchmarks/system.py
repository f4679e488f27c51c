"""One measured system as a process of its own, and the machine that it runs on."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent

# glibc gives big blocks back to the system at once and faults them in again: TRL's steps are about a third shorter
# when it does not (RESULTS.md). The lab sets the same for itself (grpo_core/allocator.py).
TRL_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**34)}


class WorkerDied(Exception):
    """The process ended instead of answering: most often its memory limit."""


class System:
    """A worker that does one optimizer step per `step()` and sleeps in between."""

    def __init__(self, name: str, spec: dict[str, Any]):
        self.name = name
        self.answers: list[dict[str, Any]] = []
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", **(TRL_ALLOCATOR if name == "trl" else {})}
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / f"{name}_worker.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self._send(json.dumps({**spec, "memory_limit_gib": 0.75 * memory_gib()}))
        self.ready = self._receive()

    def __enter__(self) -> System:
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it died before
            self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def step(self) -> dict[str, Any]:
        """Do one step; its answer is also kept in `answers`.

        Raises:
            WorkerDied: there is no answer.
        """
        self._send("step")
        self.answers.append(self._receive())
        return self.answers[-1]

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            print(line, file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise WorkerDied(self.name) from None

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise WorkerDied(f"{self.name} ended with code {self._process.wait()}")
        return json.loads(line)


def memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def machine() -> dict[str, Any]:
    """What the figures depend on beside the code."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    models = [line.split(":", 1)[1].strip() for line in info.splitlines() if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory_gib(), 1),
        **{name: version(name) for name in ("torch", "transformers", "peft", "trl")},
    }
