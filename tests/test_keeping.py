"""Checkpoints beside training: what stays, what is tried again, and what a store's faults cannot do."""

import errno
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from grpo_core import keeping
from grpo_core.checkpoints import CheckpointStore, Manifest
from grpo_core.errors import CheckpointConflict, DiskFull
from grpo_core.keeping import Keeper, Retention


class Faulty(MemoryFileSystem):
    """Memory whose uploads fail as `fault` says: called with the number of the upload and its path."""

    protocol = "faulty"
    cachable = False
    fault: Callable[[int, str], None] = staticmethod(lambda number, path: None)
    uploads = 0

    def put_file(self, lpath: str, rpath: str, callback: Any = None, **values: Any) -> None:
        type(self).uploads += 1
        super().put_file(lpath, rpath, **values)
        type(self).fault(self.uploads, rpath)


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Faulty]]:
    fsspec.register_implementation("faulty", Faulty, clobber=True)
    monkeypatch.setattr(keeping, "RETRY_DELAYS_S", (0.0, 0.0, 0.0))
    Faulty.uploads = 0
    yield Faulty
    Faulty.fault = staticmethod(lambda number, path: None)


def manifest(step: int, reward: float | None = None) -> Manifest:
    validation = {} if reward is None else {"eval/reward": reward}
    return Manifest(step, "rl", False, {}, {}, "digest", {}, None, {}, "run", validation)


def staged(tmp_path: Path, step: int) -> Path:
    folder = tmp_path / f"staged-{step}"
    folder.mkdir()
    (folder / "weights").write_text(f"weights of step {step}")
    return folder


def test_first_newest_round_and_best_stay() -> None:
    rewards = {0: 0.9, 10: 0.5, 20: 0.8, 30: 0.8, 40: 0.1, 50: None, 60: 0.2, 70: 0.3}
    manifests = [manifest(step, reward) for step, reward in rewards.items() if step]
    # Of 20 and 30, equally good, the earlier stays.
    assert Retention(last=2).expendable(manifests) == [10, 30, 40, 50]
    assert Retention(last=2, every=20).expendable(manifests) == [10, 30, 50]
    assert Retention(last=9).expendable(manifests) == []
    # The first one stays although others are better.
    assert Retention(last=1).expendable([manifest(0), *manifests]) == [10, 30, 40, 50, 60]


def test_old_checkpoints_go_only_after_the_new_one_is_whole(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path / "run"))
    with Keeper(store, Retention(last=1)) as keeper:
        for step in (0, 1, 2):
            keeper.keep(staged(tmp_path, step), manifest(step))
            keeper.join()
            assert store.steps() == ([0, step] if step else [0])
    assert not list(tmp_path.glob("staged-*"))


def test_leftovers_of_a_killed_writer_are_removed(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path / "run"))
    half = tmp_path / "run" / "step-000005"
    half.mkdir(parents=True)
    (half / "weights").write_text("half")
    with Keeper(store, Retention(last=1)):
        assert not half.exists()


def test_upload_runs_beside_training_and_is_joined_before_the_next(tmp_path: Path, faulty: type[Faulty]) -> None:
    going, go_on = threading.Event(), threading.Event()

    def wait(number: int, path: str) -> None:
        going.set()
        assert go_on.wait(60)

    faulty.fault = staticmethod(wait)
    store = CheckpointStore(f"faulty://{tmp_path.name}")
    with Keeper(store, Retention(last=3)) as keeper:
        keeper.keep(staged(tmp_path, 1), manifest(1))
        assert going.wait(60)
        assert store.steps() == []  # training goes on meanwhile
        go_on.set()
        keeper.keep(staged(tmp_path, 2), manifest(2))
        assert store.steps()[0] == 1
    assert store.steps() == [1, 2]


def test_failed_upload_is_tried_again(tmp_path: Path, faulty: type[Faulty]) -> None:
    def twice(number: int, path: str) -> None:
        if number <= 2:
            raise OSError(errno.EIO, "503 Slow Down")

    faulty.fault = staticmethod(twice)
    notices: list[str] = []
    store = CheckpointStore(f"faulty://{tmp_path.name}")
    with Keeper(store, Retention(last=1), notices.append) as keeper:
        keeper.keep(staged(tmp_path, 1), manifest(1))
    assert faulty.uploads == 3
    assert [text for text in notices if "503 Slow Down" in text] == notices != []
    with store.opened(1) as folder:
        assert (folder / "weights").read_text() == "weights of step 1"


def test_short_write_is_noticed_and_written_again(tmp_path: Path, faulty: type[Faulty]) -> None:
    def cut(number: int, path: str) -> None:
        if number == 1:
            store._fs.pipe_file(path, b"weigh")

    faulty.fault = staticmethod(cut)
    store = CheckpointStore(f"faulty://{tmp_path.name}")
    notices: list[str] = []
    with Keeper(store, Retention(last=1), notices.append) as keeper:
        keeper.keep(staged(tmp_path, 1), manifest(1))
    assert "5 of 17 bytes arrived" in notices[0]  # len("weights of step 1") is 17
    with store.opened(1) as folder:
        assert (folder / "weights").read_text() == "weights of step 1"


def test_upload_that_fails_for_good_keeps_the_local_copy_and_what_was_there(
    tmp_path: Path, faulty: type[Faulty]
) -> None:
    store = CheckpointStore(f"faulty://{tmp_path.name}")
    notices: list[str] = []

    def always(number: int, path: str) -> None:
        raise OSError(errno.EIO, "gone")

    with pytest.raises(OSError, match="gone"), Keeper(store, Retention(last=1), notices.append) as keeper:
        keeper.keep(staged(tmp_path, 1), manifest(1))
        keeper.join()
        faulty.fault = staticmethod(always)
        keeper.keep(staged(tmp_path, 2), manifest(2))
    assert store.steps() == [1]
    assert (tmp_path / "staged-2" / "weights").read_text() == "weights of step 2"
    assert f"it stays in {tmp_path / 'staged-2'}" in notices[-1]


def test_full_disk_is_named_and_not_tried_again(tmp_path: Path, faulty: type[Faulty]) -> None:
    def full(number: int, path: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    faulty.fault = staticmethod(full)
    store = CheckpointStore(f"faulty://{tmp_path.name}")
    with pytest.raises(DiskFull, match="no space is left"), Keeper(store, Retention(last=1), str) as keeper:
        keeper.keep(staged(tmp_path, 1), manifest(1))
    assert faulty.uploads == 1


def test_writer_that_lost_its_folder_adds_nothing_to_it(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path / "run"))
    with pytest.raises(CheckpointConflict, match="writes to"), Keeper(store, Retention(last=1), str) as keeper:
        (tmp_path / "run" / "writer.json").write_text(
            '{"token": "other", "process": {"host": "elsewhere", "pid": 1, "started": "1"}}'
        )
        keeper.keep(staged(tmp_path, 1), manifest(1))
    assert store.steps() == []
