"""What a stage has to tell the tracking store, on this machine's disk first.

One file per attempt of a stage, one JSON document a line. It stays until the store has taken all of it, so a store
that is down, or a process that is killed, loses nothing: the next job delivers what was left behind.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from filelock import FileLock, Timeout

from grpo_core.home import lab_home
from grpo_core.processes import Process

Entry = dict[str, Any]


def journal_folder() -> Path:
    """Where journals wait."""
    return lab_home() / "mlflow" / "journals"


class Journal:
    """One append-only file of entries; its first line says which process writes it."""

    def __init__(self, path: Path):
        self.path = path

    @classmethod
    def begin(cls, name: str) -> Self:
        """Make a new one."""
        journal_folder().mkdir(parents=True, exist_ok=True)
        journal = cls(journal_folder() / f"{name}-{uuid.uuid4().hex[:8]}.jsonl")
        journal.append({"process": vars(Process.this())})
        return journal

    def append(self, entry: Mapping[str, Any]) -> None:
        """Add one entry; it is on disk, as far as a killed process is concerned, when this returns."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry, ensure_ascii=False) + "\n")

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

    def remove(self) -> None:
        """Delete it: everything was delivered."""
        self.path.unlink(missing_ok=True)


@contextmanager
def left_behind() -> Iterator[list[Journal]]:
    """Journals whose process is gone, for one process at a time: a second one finds none."""
    folder = journal_folder()
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / "left-behind.lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        yield []
        return
    try:
        journals = [Journal(path) for path in sorted(folder.glob("*.jsonl"))]
        yield [journal for journal in journals if not _is_written(journal)]
    finally:
        lock.release()


def _is_written(journal: Journal) -> bool:
    """Whether more may come: its end is not there, and its process runs, or may, where it is another machine's."""
    try:
        entries = [entry for entry, _ in journal.entries()]
        return "close" not in entries[-1] and Process(**entries[0]["process"]).runs() is not False
    except (OSError, LookupError, TypeError):  # just begun, just delivered, or no journal
        return True
