"""Temporary folders: whose goes when, and whose stays."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_core.errors import DiskFull
from grpo_core.scratch import drop, remove_abandoned, staged

STAGES = """
import sys, time
from grpo_core.scratch import leave, staged
with staged() as folder:
    (folder / "weights").write_text("half")
    if sys.argv[1:] == ["leave"]:
        leave(folder)
    print(folder, flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path


def staged_elsewhere(*arguments: str) -> tuple[subprocess.Popen[str], Path]:
    """A process that is filling a staged folder, and that folder."""
    process = subprocess.Popen([sys.executable, "-c", STAGES, *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def end(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()


def test_folder_of_a_killed_process_goes_and_of_a_living_one_stays(temporary: Path) -> None:
    process, folder = staged_elsewhere()
    with staged() as mine:
        pass
    remove_abandoned()
    assert (folder / "weights").read_text() == "half" and mine.exists()
    end(process)
    remove_abandoned()
    drop(mine)
    assert list(temporary.iterdir()) == []


def test_folder_that_somebody_was_told_of_stays(temporary: Path) -> None:
    process, folder = staged_elsewhere("leave")
    end(process)
    remove_abandoned()
    assert (folder / "weights").read_text() == "half"


def test_folders_of_others_stay(temporary: Path) -> None:
    for name, owner in {
        "grpo-lab-unnamed": None,
        "grpo-lab-garbled": "{",
        "grpo-lab-elsewhere": json.dumps({"host": "elsewhere", "pid": 1, "started": "1"}),
        "other": json.dumps({"host": "elsewhere", "pid": 1, "started": "1"}),
    }.items():
        (temporary / name / "files").mkdir(parents=True)
        if owner is not None:
            (temporary / name / "process.json").write_text(owner)
    os.mkfifo(temporary / "grpo-lab-unnamed" / "process.json")  # reading it would wait for ever
    remove_abandoned()
    assert len(list(temporary.glob("*/files"))) == 4


def test_failed_staging_leaves_nothing(temporary: Path) -> None:
    with pytest.raises(RuntimeError, match="half-way"), staged() as folder:
        (folder / "weights").write_text("half")
        raise RuntimeError("half-way")
    full = RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")  # safetensors
    with pytest.raises(DiskFull, match="set TMPDIR"), staged():
        raise full
    assert list(temporary.iterdir()) == []
