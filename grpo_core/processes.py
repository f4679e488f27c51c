"""Names of processes that outlive them, to tell later whether a process still runs."""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil

_OUTERMOST = "pid:[4026531836]"
"""Linux's name of the space of process ids that is outside all containers."""


@dataclass(frozen=True)
class Process:
    """One process of one boot of one machine (or container).

    Attributes:
        host: name, id and boot of the machine, and its space of process ids.
        started: tells the process from a later one with the same id.
    """

    host: str
    pid: int
    started: str

    @classmethod
    def this(cls) -> Self:
        """The process that asks."""
        return cls(_host(), os.getpid(), _started(os.getpid()))

    def runs(self) -> bool | None:
        """Whether it still runs; None where that cannot be known from here, because it may be another machine's."""
        here = _host()
        if self.host == here:
            return _started(self.pid) == self.started
        return False if _are_boots_of_one_machine(self.host, here) else None

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host.split()[0]}"


def _host() -> str:
    """Name of this boot of this machine, in which process ids mean something; a dash for what it does not tell."""
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    parts = [
        socket.gethostname(),
        _machine_id(),
        boot.read_text().strip() if boot.exists() else "-",
        os.readlink(namespace) if namespace.is_symlink() else "-",
    ]
    return " ".join(parts)


def _machine_id() -> str:
    """machine-id(5); a dash where there is none, or none yet."""
    try:
        found = re.fullmatch(r"[0-9a-f]{32}\n?", Path("/etc/machine-id").read_text())
    except OSError:
        return "-"
    return found[0].strip() if found else "-"


def _are_boots_of_one_machine(one: str, other: str) -> bool:
    """Whether two hosts are certainly one machine before and after a restart, which ends every process.

    Never so within containers: their images bring a machine id along, and whoever runs them names the host.
    """
    ones, others = one.split(), other.split()
    if len(ones) != 4 or len(others) != 4 or "-" in ones:
        return False
    (name, machine, boot, namespace), (*_, other_boot, _) = ones, others
    return boot != other_boot and others == [name, machine, other_boot, namespace] and namespace == _OUTERMOST


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
