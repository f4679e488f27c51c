"""What a stage has to tell the tracking store, on this machine's disk first.

One file per attempt of a stage, one JSON document a line. It stays until the store has taken all of it, so a store
that is down, or a process that is killed, loses nothing: whoever delivers next delivers what was left behind.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from filelock import FileLock

from grpo_core.files import write_text
from grpo_core.home import lab_home
from grpo_core.processes import Process

Entry = dict[str, Any]

_LOCK_WAIT_S = 20.0
_CLOSE_LENGTH = 64  # bytes, at most


def journal_folder() -> Path:
    """Where journals wait."""
    return lab_home() / "mlflow" / "journals"


def delivering(uri: str) -> FileLock:
    """The lock under which one store is told, by one thread of one process of this machine at a time.

    Otherwise two attempts of one stage could both see that the store lacks a point.
    """
    journal_folder().mkdir(parents=True, exist_ok=True)
    name = hashlib.sha256(uri.encode()).hexdigest()[:16]
    return FileLock(journal_folder() / f"{name}.lock", timeout=_LOCK_WAIT_S)


class Journal:
    """One append-only file of entries; its first line says which process writes it, and what run it opens."""

    def __init__(self, path: Path):
        self.path = path
        self._torn = False

    @classmethod
    def begin(cls, name: str, header: Entry) -> Self:
        """A new one; the first `append` makes its file."""
        journal = cls(journal_folder() / f"{name}-{uuid.uuid4().hex[:8]}.jsonl")
        journal.header = {"process": vars(Process.this()), **header}
        return journal

    @cached_property
    def header(self) -> Entry:
        """The first line."""
        with self.path.open("rb") as file:
            return json.loads(file.readline())

    def append(self, *entries: Entry) -> None:
        """Add entries; they are on disk, as far as a killed process is concerned, when this returns.

        Raises:
            OSError: the disk is full, for example. What is appended later is kept.
        """
        if not self.path.exists():
            write_text(str(self.path), json.dumps(self.header, ensure_ascii=False) + "\n")
        text = "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries)
        torn, self._torn = self._torn, True
        with self.path.open("a", encoding="utf-8") as file:
            file.write("\n" + text if torn else text)
        self._torn = False

    def entries(self, offset: int = 0) -> Iterator[tuple[Entry, int]]:
        """Entries from a byte offset on, each with the offset behind it. A line cut off by a kill is left out."""
        with self.path.open("rb") as file:
            file.seek(offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                offset += len(line)
                with suppress(json.JSONDecodeError):  # written on a full disk
                    yield json.loads(line), offset

    def is_written(self) -> bool:
        """Whether more may come: its end is not there, and its process runs, or may, where it is another machine's.

        Raises:
            Exception: it was just delivered, or is no journal.
        """
        return not self._is_closed() and Process(**self.header["process"]).runs() is not False

    def ended_ms(self) -> int:
        """When its last entry was written, in milliseconds since 1970."""
        return self.path.stat().st_mtime_ns // 1_000_000

    def remove(self) -> None:
        """Delete it: everything was delivered."""
        self.path.unlink(missing_ok=True)

    def _is_closed(self) -> bool:
        with self.path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _CLOSE_LENGTH))
            *_, last, rest = b"\n", *file.read().split(b"\n")
        return rest == b"" and last.startswith(b'{"close":')


def left_behind() -> list[Journal]:
    """Journals to which nothing is added any more, in the order in which they were begun."""
    found = list[Journal]()
    for path in journal_folder().glob("*.jsonl"):
        with suppress(OSError, ValueError, LookupError, TypeError):  # just delivered, or no journal
            journal = Journal(path)
            if not journal.is_written():
                found.append(journal)
    return sorted(found, key=lambda journal: journal.header["open"]["began_ms"])
