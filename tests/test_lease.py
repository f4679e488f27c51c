"""One writer per folder: who is refused, who takes over, and what a holder that lost its lease may still do."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from grpo_core.errors import CheckpointConflict
from grpo_core.files import write_text
from grpo_core.lease import LEASE, Lease

HOLDER = """
import sys, time
from grpo_core.lease import Lease
with Lease(sys.argv[1], renew_every_s=0.05):
    print("held", flush=True)
    time.sleep(600)
"""


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
