"""The checkpoint store: what counts as a checkpoint, and what is refused."""

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from faulty import Fault, Outcome, healthy

from grpo_core.checkpoints import MANIFEST, CheckpointStore, Manifest, file_digest, policy_folder
from grpo_core.errors import CheckpointCorrupt, CheckpointError, NotFoundError


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(str(tmp_path / "run") if request.param == "local" else f"memory://{tmp_path.name}/run")


def save(store: CheckpointStore, step: int, staging: Path, content: str = "weights") -> Manifest:
    staging.mkdir(exist_ok=True)
    (staging / "adapter_config.json").write_text(content)
    files = {"adapter_config.json": file_digest(staging / "adapter_config.json")}
    manifest = Manifest(step, "rl", False, {"lr": 0.1}, {"dtype": "float32"}, "digest", files, None, {}, "run")
    store.save(staging, manifest)
    return manifest


def test_round_trip(store: CheckpointStore, tmp_path: Path) -> None:
    manifest = save(store, 3, tmp_path / "staging")
    assert store.latest() == manifest
    with store.opened(3) as folder:
        assert (folder / "adapter_config.json").read_text() == "weights"


def test_steps_are_ordered_by_number_not_by_name(store: CheckpointStore, tmp_path: Path) -> None:
    for step in (9, 10, 1_000_000, 999_999):  # seven digits sort before six as strings
        save(store, step, tmp_path / "staging")
    assert store.steps() == [9, 10, 999_999, 1_000_000]


def test_folder_without_manifest_is_no_checkpoint_and_is_written_again(store: CheckpointStore, tmp_path: Path) -> None:
    save(store, 1, tmp_path / "staging")
    save(store, 2, tmp_path / "staging")
    store._fs.rm_file(f"{store._folder(2)}/{MANIFEST}")  # the writer was killed before its last file
    assert store.steps() == [1]
    save(store, 2, tmp_path / "staging", content="other")
    with store.opened(2) as folder:
        assert (folder / "adapter_config.json").read_text() == "other"


def test_half_written_manifest_is_no_checkpoint(store: CheckpointStore, tmp_path: Path) -> None:
    save(store, 1, tmp_path / "staging")
    store._fs.pipe_file(f"{store._folder(1)}/{MANIFEST}", b'{"step": 1, "kin')
    assert store.latest() is None


def test_changed_bytes_are_noticed(store: CheckpointStore, tmp_path: Path) -> None:
    save(store, 1, tmp_path / "staging")
    store._fs.pipe_file(f"{store._folder(1)}/adapter_config.json", b"weightz")
    with pytest.raises(CheckpointCorrupt, match=r"step-000001/adapter_config\.json differs"), store.opened(1):
        pass


def test_unknown_format_is_refused(store: CheckpointStore, tmp_path: Path) -> None:
    manifest = save(store, 1, tmp_path / "staging")
    content = json.dumps({**manifest.__dict__, "format_version": 99})
    store._fs.pipe_file(f"{store._folder(1)}/{MANIFEST}", content.encode())
    with pytest.raises(CheckpointError, match="format version 99"):
        store.latest()


def test_missing_checkpoint_names_the_place(store: CheckpointStore) -> None:
    with pytest.raises(NotFoundError, match="no complete checkpoint of step 7"), store.opened(7):
        pass
    with pytest.raises(NotFoundError, match="there is no checkpoint folder") as missing, policy_folder(store.url):
        pass
    assert missing.value.exit_code == 4


def test_result_is_there_only_once_the_run_is_finished(store: CheckpointStore, tmp_path: Path) -> None:
    save(store, 1, tmp_path / "staging")
    assert store.result() is None
    store.finish(tmp_path / "staging", {"digest": "x"})
    assert store.result() == {"digest": "x"}
    assert store._fs.exists(f"{store._root}/adapter_config.json")
    store.reopen()
    assert store.result() is None and store.steps() == [1]
    assert not store._fs.exists(f"{store._root}/adapter_config.json")  # no stale policy beside a run that goes on


def test_policy_folder_takes_the_newest_checkpoint_one_checkpoint_or_a_plain_folder(
    store: CheckpointStore, tmp_path: Path
) -> None:
    save(store, 1, tmp_path / "staging", content="one")
    save(store, 2, tmp_path / "staging", content="two")
    for url, expected in ((store.url, "two"), (f"{store.url}/step-000001", "one"), (str(tmp_path / "staging"), "two")):
        with policy_folder(url) as folder:
            assert (folder / "adapter_config.json").read_text() == expected


def test_marking_partial_keeps_everything_else(store: CheckpointStore, tmp_path: Path) -> None:
    manifest = save(store, 1, tmp_path / "staging")
    store.mark(manifest, partial=True)
    assert store.latest() == Manifest(**{**manifest.__dict__, "partial": True})


def failing(operation: str, outcome: Outcome) -> Fault:
    """All calls of one operation end like this."""

    def fault(called: str, path: str) -> Outcome:
        if called != operation:
            return None
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return fault


@pytest.mark.parametrize(
    ("operation", "outcome", "message"),
    [
        ("ls", TimeoutError("no answer"), "no answer"),
        ("cat_file", TimeoutError("no answer"), "no answer"),
        ("cat_file", "cut", "bytes went over the line"),
    ],
)
def test_checkpoint_that_cannot_be_read_now_is_not_taken_for_an_incomplete_one(
    operation: str, outcome: Outcome, message: str, tmp_path: Path, faulty: Callable[[Fault], None]
) -> None:
    store = CheckpointStore(f"faulty://{tmp_path.name}/run")
    save(store, 1, tmp_path / "staging")
    faulty(failing(operation, outcome))
    with pytest.raises(OSError, match=message):
        store.latest()
    with pytest.raises(OSError, match=message):
        store.remove_incomplete()
    with pytest.raises(OSError, match=message), policy_folder(store.url):
        pass
    faulty(healthy)
    assert store.steps() == [1]


def test_download_that_breaks_off_is_no_corruption(tmp_path: Path, faulty: Callable[[Fault], None]) -> None:
    store = CheckpointStore(f"faulty://{tmp_path.name}/run")
    save(store, 1, tmp_path / "staging")
    faulty(failing("get_file", "cut"))
    with pytest.raises(OSError, match="3 bytes went over the line, 7 are stored"), store.opened(1):  # "weights" has 7
        pass


def test_manifest_is_deleted_first_though_the_store_does_not_say_what_is_there(
    tmp_path: Path, faulty: Callable[[Fault], None]
) -> None:
    store = CheckpointStore(f"faulty://{tmp_path.name}/run")
    save(store, 1, tmp_path / "staging")
    deleted: list[str] = []

    def unasked(operation: str, path: str) -> Outcome:
        if operation == "rm_file":
            deleted.append(path.rpartition("/")[2])
        return failing("info", TimeoutError("no answer"))(operation, path)

    faulty(unasked)
    with suppress(TimeoutError):
        store.remove(1)
    assert deleted[0] == MANIFEST


def test_result_that_cannot_be_asked_for_is_taken_back(tmp_path: Path, faulty: Callable[[Fault], None]) -> None:
    store = CheckpointStore(f"faulty://{tmp_path.name}/run")
    save(store, 1, tmp_path / "staging")
    store.finish(tmp_path / "staging", {"digest": "x"})
    faulty(failing("info", TimeoutError("no answer")))
    store.reopen()
    faulty(healthy)
    assert store.result() is None
