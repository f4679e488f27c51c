"""A worker's side of the conversation: JSON lines, one command in, one answer out; all else goes to stderr."""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path
from typing import Any


class Link:
    """Standard input and output, taken before a library can print there."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self.spec: dict[str, Any] = json.loads(sys.stdin.readline())
        # RLIMIT_DATA counts what a process may write, not what it maps: a failed allocation, and no thrashing machine
        limit = int(self.spec["memory_limit_gib"] * 2**30)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    def answer(self, **fields: Any) -> None:
        print(json.dumps(fields), file=self._out, flush=True)

    def wait(self) -> None:
        """Return at the next ``step``; leave when there is none."""
        if sys.stdin.readline().strip() != "step":
            sys.exit(0)


def peak_memory_gib() -> float:
    """The process's largest resident set so far."""
    status = Path("/proc/self/status").read_text()
    kib = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))
    return int(kib) / 2**20
