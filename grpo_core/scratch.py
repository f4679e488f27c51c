"""Temporary folders that go with their process, even if it is killed: the next run removes what it left.

Each lies in a folder of its own beside a file that names the process. Without that file it is nobody's and stays.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from grpo_core.errors import LabError
from grpo_core.files import full_disk_named, read_json, write_json
from grpo_core.processes import Process

_PREFIX = "grpo-lab-"
_OWNER = "process.json"


@contextmanager
def staged() -> Iterator[Path]:
    """A new folder to be filled within the block; if that fails it goes, else it is the caller's to `drop` or `leave`.

    Raises:
        DiskFull: there is no space left for what belongs into it.
    """
    own = Path(tempfile.mkdtemp(prefix=_PREFIX))
    folder = own / "files"
    try:
        hint = "free some space there, or set TMPDIR to a folder on another disk; started again, the job resumes"
        with full_disk_named(str(folder), hint):
            write_json(str(own / _OWNER), vars(Process.this()))
            folder.mkdir()
            yield folder
    except BaseException:
        drop(folder)
        raise


def drop(folder: Path) -> None:
    """Delete a staged folder."""
    assert folder.parent.name.startswith(_PREFIX), folder
    shutil.rmtree(folder, ignore_errors=True)  # before what says whose it is, as this may be killed half-way
    shutil.rmtree(folder.parent, ignore_errors=True)


def leave(folder: Path) -> None:
    """Make a staged folder nobody's: it stays until a person deletes it."""
    (folder.parent / _OWNER).unlink(missing_ok=True)


def remove_abandoned() -> None:
    """Delete the staged folders of processes that are certainly gone."""
    for owner in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_OWNER}"):
        try:
            gone = owner.is_file() and Process(**read_json(str(owner))).runs() is False
        except (OSError, ValueError, TypeError, LabError):  # somebody else's, being written, or just deleted
            continue
        if gone:
            drop(owner.parent / "files")
