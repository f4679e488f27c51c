"""Checkpoints beside training: what stays, what is tried again, and what a store's faults cannot do."""

import errno
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from faulty import Fault, Outcome, healthy

from grpo_core.checkpoints import CheckpointStore, Manifest
from grpo_core.errors import CheckpointConflict, DiskFull
from grpo_core.keeping import Keeper, Retention
from grpo_core.scratch import staged


class Uploads:
    """What `fault` makes of uploads, called with the number of each and its path."""

    def __init__(self, fault: Callable[[int, str], Outcome]):
        self.number = 0
        self._fault = fault

    def __call__(self, operation: str, path: str) -> Outcome:
        if operation != "put_file":
            return None
        self.number += 1
        return self._fault(self.number, path)


def manifest(step: int, reward: float | None = None) -> Manifest:
    validation = {} if reward is None else {"eval/reward": reward}
    return Manifest(step, "rl", False, {}, {}, "digest", {}, None, {}, "run", validation)


def weights(step: int) -> Path:
    """A staged folder with one file."""
    with staged() as folder:
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
            folder = weights(step)
            keeper.keep(folder, manifest(step))
            keeper.join()
            assert store.steps() == ([0, step] if step else [0])
            assert not folder.parent.exists()


def test_nothing_is_deleted_for_a_checkpoint_that_did_not_arrive(
    tmp_path: Path, faulty: Callable[[Fault], None]
) -> None:
    store = CheckpointStore(f"faulty://{tmp_path.name}")
    cut: Fault = lambda operation, path: (  # noqa: E731
        "cut" if operation == "pipe_file" and path.endswith("step-000003/manifest.json") else None
    )
    with Keeper(store, Retention(last=1), str) as keeper:
        for step in (0, 1, 2):
            keeper.keep(weights(step), manifest(step))
        keeper.join()
        assert store.steps() == [0, 2]
        faulty(cut)
        keeper.keep(folder := weights(3), manifest(3))
        with pytest.raises(OSError, match="are stored"):
            keeper.join()
        assert store.steps() == [0, 2]
        faulty(healthy)
        keeper.keep(weights(4), manifest(4))
        keeper.join()
        assert store.steps() == [0, 4] and store._folders() == [0, 4]
    assert (folder / "weights").exists()


def test_what_could_not_be_deleted_goes_after_the_next_checkpoint(
    tmp_path: Path, faulty: Callable[[Fault], None]
) -> None:
    def keeps_weights(operation: str, path: str) -> Outcome:
        if operation == "rm_file" and path.endswith("weights"):
            raise PermissionError("AccessDenied")
        return None

    faulty(keeps_weights)
    notices: list[str] = []
    store = CheckpointStore(f"faulty://{tmp_path.name}")
    with Keeper(store, Retention(last=1), notices.append) as keeper:
        for step in (0, 1, 2):
            keeper.keep(weights(step), manifest(step))
        keeper.join()
        assert store.steps() == [0, 2] and store._folders() == [0, 1, 2]
        assert "could not be deleted: AccessDenied" in notices[-1]
        faulty(healthy)
        keeper.keep(weights(3), manifest(3))
        keeper.join()
        assert store._folders() == [0, 3]


def test_writer_that_lost_its_folder_deletes_nothing_in_it(tmp_path: Path) -> None:
    half = tmp_path / "run" / "step-000005"
    half.mkdir(parents=True)
    with Keeper(CheckpointStore(str(tmp_path / "run")), Retention(last=1), str) as keeper:
        (tmp_path / "run" / "writer.json").write_text(
            '{"token": "other", "process": {"host": "elsewhere", "pid": 1, "started": "1"}}'
        )
        keeper.tidy()
    assert half.exists()  # the other one is writing it


def test_mark_that_arrived_in_part_is_written_again(tmp_path: Path, faulty: Callable[[Fault], None]) -> None:
    store = CheckpointStore(f"faulty://{tmp_path.name}")
    cuts = iter([True])
    with Keeper(store, Retention(last=1), str) as keeper:
        keeper.keep(weights(1), manifest(1))
        keeper.join()
        faulty(
            lambda operation, path: (
                "cut" if operation == "pipe_file" and "manifest" in path and next(cuts, False) else None
            )
        )
        keeper.mark(1, partial=True)
    assert [each.partial for each in store.manifests()] == [True]


def test_leftovers_of_a_killed_writer_are_removed(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path / "run"))
    half = tmp_path / "run" / "step-000005"
    half.mkdir(parents=True)
    (half / "weights").write_text("half")
    with Keeper(store, Retention(last=1)) as keeper:
        keeper.tidy()
    assert not half.exists()


def test_upload_runs_beside_training_and_is_joined_before_the_next(
    tmp_path: Path, faulty: Callable[[Fault], None]
) -> None:
    going, go_on = threading.Event(), threading.Event()

    def wait(number: int, path: str) -> None:
        going.set()
        assert go_on.wait(60)

    faulty(Uploads(wait))
    store = CheckpointStore(f"faulty://{tmp_path.name}")
    with Keeper(store, Retention(last=3)) as keeper:
        keeper.keep(weights(1), manifest(1))
        assert going.wait(60)
        assert store.steps() == []  # training goes on meanwhile
        go_on.set()
        keeper.keep(weights(2), manifest(2))
        assert store.steps()[0] == 1
    assert store.steps() == [1, 2]


def test_failed_upload_is_tried_again(tmp_path: Path, faulty: Callable[[Fault], None]) -> None:
    def twice(number: int, path: str) -> None:
        if number <= 2:
            raise OSError(errno.EIO, "503 Slow Down")

    uploads = Uploads(twice)
    faulty(uploads)
    notices: list[str] = []
    store = CheckpointStore(f"faulty://{tmp_path.name}")
    with Keeper(store, Retention(last=1), notices.append) as keeper:
        keeper.keep(weights(1), manifest(1))
    assert uploads.number == 3
    assert [text for text in notices if "503 Slow Down" in text] == notices != []
    with store.opened(1) as folder:
        assert (folder / "weights").read_text() == "weights of step 1"


def test_short_write_is_noticed_and_written_again(tmp_path: Path, faulty: Callable[[Fault], None]) -> None:
    faulty(Uploads(lambda number, path: "cut" if number == 1 else None))
    store = CheckpointStore(f"faulty://{tmp_path.name}")
    notices: list[str] = []
    with Keeper(store, Retention(last=1), notices.append) as keeper:
        keeper.keep(weights(1), manifest(1))
    assert "17 bytes went over the line, 8 are stored" in notices[0]  # len("weights of step 1") is 17
    with store.opened(1) as folder:
        assert (folder / "weights").read_text() == "weights of step 1"


def test_upload_that_fails_for_good_keeps_the_local_copy_and_what_was_there(
    tmp_path: Path, faulty: Callable[[Fault], None]
) -> None:
    store = CheckpointStore(f"faulty://{tmp_path.name}")
    notices: list[str] = []

    def always(number: int, path: str) -> None:
        raise OSError(errno.EIO, "gone")

    with pytest.raises(OSError, match="gone"), Keeper(store, Retention(last=1), notices.append) as keeper:
        keeper.keep(weights(1), manifest(1))
        keeper.join()
        faulty(Uploads(always))
        keeper.keep(folder := weights(2), manifest(2))
    assert store.steps() == [1]
    assert f"it stays in {folder}" in notices[-1]
    faulty(healthy)
    store._fs.put(f"{folder}/", f"{store._folder(2)}/", recursive=True)
    with store.opened(2) as copied:  # what stays is a whole checkpoint
        assert (copied / "weights").read_text() == "weights of step 2"


def test_full_disk_is_named_and_not_tried_again(tmp_path: Path, faulty: Callable[[Fault], None]) -> None:
    def full(number: int, path: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    uploads = Uploads(full)
    faulty(uploads)
    store = CheckpointStore(f"faulty://{tmp_path.name}")
    with pytest.raises(DiskFull, match="no space is left"), Keeper(store, Retention(last=1), str) as keeper:
        keeper.keep(weights(1), manifest(1))
    assert uploads.number == 1


def test_writer_that_lost_its_folder_adds_nothing_to_it(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path / "run"))
    with pytest.raises(CheckpointConflict, match="writes to"), Keeper(store, Retention(last=1), str) as keeper:
        (tmp_path / "run" / "writer.json").write_text(
            '{"token": "other", "process": {"host": "elsewhere", "pid": 1, "started": "1"}}'
        )
        keeper.keep(weights(1), manifest(1))
    assert store.steps() == []
