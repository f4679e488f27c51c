"""One writer per folder: who is refused, who takes over, and what a holder that lost its lease may still do."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from faulty import Fault, FaultyFileSystem, Outcome

from grpo_core import lease as lease_module
from grpo_core import processes
from grpo_core.errors import CheckpointConflict
from grpo_core.files import write_text
from grpo_core.lease import LEASE, Lease
from grpo_core.processes import Process

HOLDER = """
import sys, time
from grpo_core.lease import Lease
with Lease(sys.argv[1], renew_every_s=0.05):
    print("held", flush=True)
    time.sleep(600)
"""


ANCESTOR = "trainer 0123456789abcdef0123456789abcdef boot-1 pid:[4026531836]"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "SETTLE_S", 0.02)


@pytest.fixture(params=["local", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "run") if request.param == "local" else f"memory://{tmp_path.name}/run"


def lease(folder: str, *, elsewhere: bool = False) -> Lease:
    made = Lease(folder, renew_every_s=0.05, expires_after_s=0.5, waiting=lambda text: None)
    if elsewhere:
        made._me = replace(made._me, process={**made._me.process, "host": "elsewhere boot-1"})
    return made


def test_second_writer_is_refused_while_the_first_lives_and_free_after(folder: str) -> None:
    refused = pytest.raises(CheckpointConflict, match=rf"process {os.getpid()} on .* writes to")
    with lease(folder), refused, lease(folder):
        pass
    with lease(folder) as again:
        again.confirm()


def test_holder_on_another_host_is_watched_and_seen_to_live(folder: str) -> None:
    with lease(folder, elsewhere=True), pytest.raises(CheckpointConflict, match="on elsewhere writes"), lease(folder):
        pass


def test_holder_on_another_host_that_stands_still_is_taken_over(folder: str) -> None:
    dead = lease(folder, elsewhere=True)
    dead.__enter__()
    dead._released.set()  # its process is gone: no renewal comes, and nothing is given back
    dead._thread.join()
    with lease(folder) as mine:
        mine.confirm()
        with pytest.raises(CheckpointConflict, match=f"process {os.getpid()}"):
            dead.confirm()
    with lease(folder):  # given back
        pass


def test_lost_lease_is_not_given_back_for_the_new_holder(folder: str) -> None:
    first = lease(folder, elsewhere=True)
    first.__enter__()
    first._released.set()
    first._thread.join()
    with lease(folder) as second:
        first.__exit__(None, None, None)
        second.confirm()


def test_lease_that_an_outage_kept_from_being_given_back_is_taken_by_the_next_try(folder: str) -> None:
    first = lease(folder)
    with first:
        left = first._text()
    write_text(first._url, left)  # as if it could not be removed
    with lease(folder) as second:
        second.confirm()


def test_removed_lease_is_taken_again(tmp_path: Path) -> None:
    with lease(str(tmp_path)) as held:
        (tmp_path / LEASE).unlink()
        held.confirm()
        assert json.loads((tmp_path / LEASE).read_text())["token"] == held._me.token


def test_killed_holder_on_this_host_is_taken_over_at_once(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    with pytest.raises(CheckpointConflict, match=f"process {process.pid} "), lease(str(tmp_path)):
        pass
    process.send_signal(signal.SIGKILL)
    process.wait()
    # expiry is far away: a holder of another host would be watched for an hour
    with Lease(str(tmp_path), expires_after_s=3600, waiting=pytest.fail):
        pass


def test_unreadable_lease_is_watched_like_any_other(tmp_path: Path) -> None:
    (tmp_path / LEASE).write_text("{")
    told: list[str] = []
    with Lease(str(tmp_path), renew_every_s=0.05, expires_after_s=0.2, waiting=told.append) as mine:
        mine.confirm()
    assert len(told) == 1


def test_store_that_creates_what_exists_lets_no_second_writer_in(
    faulty: Callable[[Fault], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FaultyFileSystem, "exclusive", False)
    with lease(f"faulty://{tmp_path.name}") as first:
        with pytest.raises(CheckpointConflict, match="writes to"), lease(f"faulty://{tmp_path.name}"):
            pass
        first.confirm()


def test_of_two_that_found_the_folder_free_one_has_it_though_the_store_let_both_create(
    faulty: Callable[[Fault], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FaultyFileSystem, "exclusive", False)
    both_looked, both_wrote, both_over = threading.Barrier(2), threading.Barrier(2), threading.Barrier(2)
    creating = threading.local()
    monkeypatch.setattr(lease_module, "SETTLE_S", 0.0)
    monkeypatch.setattr(lease_module.time, "sleep", lambda delay_s: both_wrote.wait(60))

    def meet(operation: str, path: str) -> Outcome:
        if operation == "pipe_file" and not getattr(creating, "met", False):
            creating.met = True
            both_looked.wait(60)
        return None

    faulty(meet)

    def enter(number: int) -> bool:
        try:
            with Lease(f"faulty://{tmp_path.name}", renew_every_s=60):
                both_over.wait(60)
                return True
        except CheckpointConflict:
            both_over.wait(60)
            return False

    with ThreadPoolExecutor(max_workers=2) as pool:
        assert sorted(pool.map(enter, range(2))) == [False, True]


@pytest.mark.parametrize("jump_s", [-7 * 86_400.0, 7 * 86_400.0])
def test_clock_that_jumps_neither_frees_a_folder_nor_closes_it(
    folder: str, jump_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, real_ns = time.time, time.time_ns
    with lease(folder, elsewhere=True) as held:
        monkeypatch.setattr(time, "time", lambda: real() + jump_s)
        monkeypatch.setattr(time, "time_ns", lambda: real_ns() + int(jump_s * 1e9))
        with pytest.raises(CheckpointConflict, match="on elsewhere writes"), lease(folder):
            pass
        held.confirm()
    with lease(folder):
        pass


def test_process_of_an_earlier_boot_of_this_machine_is_gone_and_of_what_may_be_another_is_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ancestor = Process(ANCESTOR, os.getpid(), Process.this().started)
    for here, runs in {
        ANCESTOR: True,
        ANCESTOR.replace("boot-1", "boot-2"): False,
        # another name, another machine, one that tells no id, and containers, whose images tell theirs
        ANCESTOR.replace("boot-1", "boot-2").replace("trainer", "other"): None,
        ANCESTOR.replace("boot-1", "boot-2").replace("0123", "3210"): None,
        "trainer - boot-2 pid:[4026531836]": None,
        ANCESTOR.replace("boot-1", "boot-2").replace("1836", "2001"): None,
    }.items():
        monkeypatch.setattr(processes, "_host", lambda here=here: here)
        assert ancestor.runs() is runs, here
    contained = Process(ANCESTOR.replace("1836", "2001"), 1, "1")
    monkeypatch.setattr(processes, "_host", lambda: contained.host.replace("boot-1", "boot-2"))
    assert contained.runs() is None
    nameless = Process("trainer - boot-1 pid:[4026531836]", 1, "1")
    monkeypatch.setattr(processes, "_host", lambda: nameless.host.replace("boot-1", "boot-2"))
    assert nameless.runs() is None


def test_lease_of_an_earlier_boot_is_taken_over_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_host", lambda: ANCESTOR)
    left = Lease(str(tmp_path))._text()
    (tmp_path / LEASE).write_text(left)
    monkeypatch.setattr(processes, "_host", lambda: ANCESTOR.replace("boot-1", "boot-2"))
    with Lease(str(tmp_path), expires_after_s=3600, waiting=pytest.fail):
        pass


def test_renewal_that_arrived_in_part_is_still_the_holders(tmp_path: Path) -> None:
    with lease(str(tmp_path)) as held:
        held._released.set()
        held._thread.join()
        text = held._text()
        (tmp_path / LEASE).write_text(text[: len(text) // 2])
        held.confirm()
        (tmp_path / LEASE).write_text("{")
        with pytest.raises(CheckpointConflict, match="another process writes"):
            held.confirm()
