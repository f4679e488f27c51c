"""Names of processes that outlive them, to tell later whether a process still runs."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil


@dataclass(frozen=True)
class Process:
    """One process of one boot of one machine (or container).

    Attributes:
        host: name and boot of the machine, and its space of process ids. started: tells the process from a later one
            with the same id.
    """

    host: str
    pid: int
    started: str

    @classmethod
    def this(cls) -> Self:
        """The process that asks."""
        return cls(_host(), os.getpid(), _started(os.getpid()))

    def runs(self) -> bool | None:
        """Whether it still runs; None where that cannot be known from here, because it is another machine's."""
        return _started(self.pid) == self.started if self.host == _host() else None

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host.split()[0]}"


def _host() -> str:
    """Name of this boot of this machine, in which process ids mean something."""
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    parts = [socket.gethostname()]
    if boot.exists():
        parts.append(boot.read_text().strip())
    if namespace.is_symlink():
        parts.append(os.readlink(namespace))
    return " ".join(parts)


def _started(pid: int) -> str:
    """What tells a running process from a later one of the same id; empty where there is none.

    On Linux the kernel's count since boot: a time of day would change with the clock.
    """
    if not Path("/proc/self/stat").exists():
        return "running" if psutil.pid_exists(pid) else ""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]  # proc(5): state and starttime
