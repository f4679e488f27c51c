"""A store that misbehaves: ``faulty://`` shows what ``memory://`` holds, over a line as bad as a test wants it."""

from __future__ import annotations

import errno
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar, Literal

from fsspec.implementations.memory import MemoryFileSystem

Outcome = Literal["cut"] | Exception | None
Fault = Callable[[str, str], Outcome]


def healthy(operation: str, path: str) -> Outcome:
    return None


class FaultyFileSystem(MemoryFileSystem):
    """Asks `fault` about each operation and its path.

    Where that raises, nothing is done; an error that it returns is raised when all is done, as if the answer was lost;
    "cut" lets half of the bytes through and says that all is well. `exclusive` is whether creating what exists fails.
    """

    protocol = "faulty"
    cachable = False
    fault: ClassVar[Fault] = staticmethod(healthy)
    exclusive: ClassVar[bool] = True

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.replace("faulty://", "memory://"))

    def put_file(self, lpath: str, rpath: str, callback: Any = None, **values: Any) -> None:
        outcome = self._asked("put_file", rpath)
        super().put_file(lpath, rpath, **values)
        if outcome == "cut":
            stored = super().cat_file(rpath)
            super().pipe_file(rpath, stored[: len(stored) // 2])
        _raised(outcome)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **values: Any) -> None:
        outcome = self._asked("pipe_file", path)
        content = value[: len(value) // 2] if outcome == "cut" else value
        super().pipe_file(path, content, mode if self.exclusive else "overwrite")
        _raised(outcome)

    def get_file(self, rpath: str, lpath: str, callback: Any = None, **values: Any) -> None:
        outcome = self._asked("get_file", rpath)
        content = super().cat_file(rpath)
        with open(lpath, "wb") as file:
            file.write(content[: len(content) // 2] if outcome == "cut" else content)
        _raised(outcome)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **values: Any) -> bytes:
        outcome = self._asked("cat_file", path)
        content = super().cat_file(path)
        _raised(outcome)
        return content[: len(content) // 2] if outcome == "cut" else content

    def rm_file(self, path: str) -> None:
        outcome = self._asked("rm_file", path)
        super().rm_file(path)
        _raised(outcome)

    def ls(self, path: str, detail: bool = True, **values: Any) -> Any:
        outcome = self._asked("ls", path)
        found = super().ls(path, detail)
        _raised(outcome)
        return found

    def info(self, path: str, **values: Any) -> Any:
        outcome = self._asked("info", path)
        found = super().info(path)
        _raised(outcome)
        return found

    def _asked(self, operation: str, path: str) -> Outcome:
        return type(self).fault(operation, path)


def _raised(outcome: Outcome) -> None:
    if isinstance(outcome, Exception):
        raise outcome


class Chances:
    """Makes a share of all operations fail, each in one of many ways, as a seed decides."""

    def __init__(self, seed: int, share: float):
        self._random, self._share = random.Random(seed), share
        self._lock = threading.Lock()
        self.done = Counter[str]()

    def __call__(self, operation: str, path: str) -> Outcome:
        with self._lock:
            if self._random.random() >= self._share:
                return None
            kind = self._random.choice(["refused", "connection", "busy", "answer lost", "late", "cut"])
            delay_s = self._random.choice([0.02, 0.05, 0.1, 0.8])
            if kind == "cut" and operation not in ("put_file", "pipe_file", "get_file", "cat_file"):
                kind = "refused"
            self.done[kind] += 1
            self.done[operation] += 1
        if kind == "late":
            time.sleep(delay_s)
            return None
        if kind == "cut":
            return "cut"
        error = {
            "refused": OSError(errno.EIO, "Input/output error", path),
            "connection": ConnectionError(f"connection reset during {operation}"),
            "busy": OSError(errno.EBUSY, "503 Slow Down", path),
            "answer lost": TimeoutError(f"no answer to {operation}"),
        }[kind]
        if kind == "answer lost":
            return error
        raise error
