"""Real training on stores that misbehave: it ends as on healthy ones, or with an error after which it can go on."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from faulty import Chances, Fault, Outcome, healthy
from loops import Recorder, never_without_a_checkpoint, verified_steps

from grpo_core.checkpoints import CheckpointStore
from grpo_core.config import GRPOConfig, SFTConfig
from grpo_core.errors import DiskFull, is_retryable
from grpo_core.grpo import train_grpo
from grpo_core.progress import Begun, Event, Silent, StepEvent
from grpo_core.results import TrainingResult
from grpo_core.sft import train_sft

pytestmark = pytest.mark.slow

KEPT = {"checkpoint_every": 1, "keep_last": 1}


class Watcher(Recorder):
    """Hears also the steps after which a run goes on; calls `at_step` after each step."""

    def __init__(self, at_step: Callable[[int], None] = lambda step: None):
        super().__init__()
        self.begun: list[int] = []
        self._at_step = at_step

    def emit(self, event: Event) -> None:
        super().emit(event)
        if isinstance(event, Begun):
            self.begun.append(max((int(row["step"]) for row in event.history), default=0))
        elif isinstance(event, StepEvent):
            self._at_step(event.step)

    @property
    def told(self) -> list[str]:
        return [notice.message for notice in self.notices]


def seen_healthy(url: str) -> str:
    return url.replace("faulty://", "memory://")


def again_while_it_helps(start: Callable[[], TrainingResult]) -> TrainingResult:
    """What the task's retries do, without an end and without waiting."""
    while True:
        try:
            return start()
        except Exception as error:
            if not is_retryable(error):
                raise


def test_training_on_a_store_that_fails_in_every_way_ends_as_on_a_healthy_one(
    sft: Callable[..., SFTConfig], grpo: Callable[..., GRPOConfig], faulty: Callable[[Fault], None], tmp_path: Path
) -> None:
    expected = train_grpo(grpo(init_checkpoint_dir=train_sft(sft(), Silent()).checkpoint_dir, kl_beta=0.1), Silent())
    done = Counter[str]()
    for seed in (1, 2, 3):
        base = f"faulty://{tmp_path.name}-{seed}"
        warm = sft(checkpoint_dir=f"{base}/sft", checkpoint_every=1)
        rl = grpo(checkpoint_dir=f"{base}/rl", init_checkpoint_dir=f"{base}/sft", kl_beta=0.1, **KEPT)
        chances = Chances(seed, 0.06)
        faulty(chances)
        with never_without_a_checkpoint(seen_healthy(f"{base}/sft")):
            assert again_while_it_helps(lambda warm=warm: train_sft(warm, Silent())).status == "completed"
        with never_without_a_checkpoint(seen_healthy(f"{base}/rl")):
            result = again_while_it_helps(lambda rl=rl: train_grpo(rl, Silent()))
        faulty(healthy)
        assert result.digest == expected.digest
        assert verified_steps(f"{base}/sft") == [0, 1, 2, 3]
        assert {0, 5} <= set(verified_steps(f"{base}/rl"))
        assert train_grpo(rl, Silent()) == result  # what was stored says the same
        done += chances.done
    assert {"refused", "connection", "busy", "answer lost", "late", "cut"} <= done.keys()
    assert {"put_file", "pipe_file", "get_file", "cat_file", "rm_file", "ls", "info"} <= done.keys()


@pytest.mark.parametrize("seed", [4, 5])
def test_once_training_began_no_fault_that_passes_ends_it(
    seed: int, grpo: Callable[..., GRPOConfig], faulty: Callable[[Fault], None], tmp_path: Path
) -> None:
    expected = train_grpo(grpo(), Silent())
    chances = Chances(seed, 0.08)
    watcher = Watcher(lambda step: faulty(chances))
    url = f"faulty://{tmp_path.name}-{seed}/rl"
    result = train_grpo(grpo(checkpoint_dir=url, checkpoint_every=1, keep_last=2), watcher)
    faulty(healthy)
    assert result.digest == expected.digest
    assert {0, 4, 5} <= set(verified_steps(url))
    assert watcher.series("reward") and sum(chances.done.values()) > 5
    assert any("trying again" in notice for notice in watcher.told)


def refused(operation: str, path: str) -> Outcome:
    if operation == "put_file":
        raise ConnectionError("no route to host")
    return None


def cut(operation: str, path: str) -> Outcome:
    return "cut" if operation in ("put_file", "pipe_file") else None


def cut_manifests(operation: str, path: str) -> Outcome:
    return "cut" if operation == "pipe_file" and path.endswith("manifest.json") else None


def unanswered(operation: str, path: str) -> Outcome:
    raise TimeoutError("no answer")


@pytest.mark.parametrize("fault", [refused, cut, cut_manifests, unanswered])
def test_store_that_fails_for_good_ends_training_where_it_can_go_on(
    fault: Fault, grpo: Callable[..., GRPOConfig], faulty: Callable[[Fault], None], tmp_path: Path
) -> None:
    expected = train_grpo(grpo(), Silent())
    url = f"faulty://{tmp_path.name}-{fault.__name__}/rl"
    config = grpo(checkpoint_dir=url, checkpoint_every=1)
    watcher = Watcher(lambda step: faulty(fault) if step == 3 else None)
    with pytest.raises(OSError), never_without_a_checkpoint(seen_healthy(url)):
        train_grpo(config, watcher)
    faulty(healthy)
    kept = [found for notice in watcher.told if (found := re.search(r"of step (\d) .* stays in (\S+)", notice))]
    assert kept and all(int(found[1]) >= 2 for found in kept)
    begin = verified_steps(url)[-1]
    assert begin >= 1
    newest = max(kept, key=lambda found: int(found[1]))
    if int(newest[1]) > begin:  # what stays can be put where it belongs, and is taken up
        CheckpointStore(url)._fs.put(f"{newest[2]}/", f"{url}/step-00000{newest[1]}/", recursive=True)
        begin = int(newest[1])
    later = Watcher()
    assert train_grpo(config, later).digest == expected.digest
    assert later.begun == [begin]
    forget_what_stays(watcher)


def test_store_that_neither_lists_nor_deletes_keeps_more_until_it_does(
    grpo: Callable[..., GRPOConfig], faulty: Callable[[Fault], None], tmp_path: Path
) -> None:
    def stubborn(operation: str, path: str) -> Outcome:
        if operation in ("ls", "rm_file"):
            raise PermissionError("AccessDenied")
        return None

    expected = train_grpo(grpo(), Silent())
    url = f"faulty://{tmp_path.name}/rl"
    watcher = Watcher(lambda step: faulty({1: stubborn, 4: healthy}.get(step, stubborn)))
    result = train_grpo(grpo(checkpoint_dir=url, checkpoint_every=1, keep_last=1), watcher)
    assert result.digest == expected.digest
    assert any("could not be deleted" in notice and "AccessDenied" in notice for notice in watcher.told)


def test_clock_that_jumps_changes_nothing(grpo: Callable[..., GRPOConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    straight = Watcher()
    expected = train_grpo(grpo(checkpoint_every=1), straight)
    real, real_ns, jump_s = time.time, time.time_ns, 0.0

    def jump(step: int) -> None:
        nonlocal jump_s
        jump_s = 36_000.0 * (-1) ** step * step  # hours back, more hours forward, ...

    monkeypatch.setattr(time, "time", lambda: real() + jump_s)
    monkeypatch.setattr(time, "time_ns", lambda: real_ns() + int(jump_s * 1e9))
    config = grpo(checkpoint_dir=f"{expected.checkpoint_dir}-2", checkpoint_every=1)
    jumping = Watcher(jump)
    result = train_grpo(config, jumping)
    assert result.digest == expected.digest and 0 <= result.duration_s < 3600
    assert verified_steps(config.checkpoint_dir) == verified_steps(expected.checkpoint_dir)
    assert len(straight.steps) == len(jumping.steps) >= 5
    for one, other in zip(straight.steps, jumping.steps, strict=True):
        assert one.step == other.step
        assert {name: value for name, value in one.metrics.items() if not name.startswith("time/")} == {
            name: value for name, value in other.metrics.items() if not name.startswith("time/")
        }
        assert all(0 <= value < 3600 for name, value in other.metrics.items() if name.startswith("time/"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder that is a disk of 2 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    if shutil.which("mount") is None:
        pytest.skip("there is no mount command")
    mounting = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)]
    mounted = subprocess.run(mounting, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no disk can be mounted here: {mounted.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_full_disk_ends_the_job_which_goes_on_when_it_may_keep_less(
    small_disk: Path, sft: Callable[..., SFTConfig], tmp_path: Path
) -> None:
    size = {"examples": 64, "checkpoint_every": 1}
    expected = train_sft(sft(**size), Silent())
    config = sft(**size, checkpoint_dir=str(small_disk / "run"), keep_every=1)
    watcher = Watcher()
    with never_without_a_checkpoint(config.checkpoint_dir):
        with pytest.raises(DiskFull, match=r"checkpoint_dir: no space is left .* lower keep_last"):
            train_sft(config, watcher)
        steps = verified_steps(config.checkpoint_dir)
        assert 2 < len(steps) < 17 and steps == list(range(len(steps)))
        assert not list((small_disk / "run").glob("*.tmp"))
        later = Watcher()
        result = train_sft(sft(**size, checkpoint_dir=str(small_disk / "run"), keep_last=1), later)
    assert later.begun == [steps[-1]]
    assert result.digest == expected.digest
    assert verified_steps(config.checkpoint_dir) == [0, 16]
    forget_what_stays(watcher)


def test_disk_that_others_fill_ends_the_job_which_goes_on_when_they_have_left(
    small_disk: Path, grpo: Callable[..., GRPOConfig], tmp_path: Path
) -> None:
    expected = train_grpo(grpo(), Silent())
    config = grpo(checkpoint_dir=str(small_disk / "run"), checkpoint_every=1)

    def fill() -> None:
        with pytest.raises(OSError, match="No space left"), (small_disk / "ballast").open("wb") as file:
            while True:
                file.write(bytes(1024))
                file.flush()

    watcher = Watcher(lambda step: fill() if step == 3 else None)
    with pytest.raises(DiskFull):
        train_grpo(config, watcher)
    begin = verified_steps(config.checkpoint_dir)[-1]
    assert begin in (2, 3)  # the upload of the second may have ended before the disk was filled, or not
    with pytest.raises(DiskFull, match="checkpoint_dir: no space is left"):  # nothing has changed
        train_grpo(config, Silent())
    (small_disk / "ballast").unlink()
    later = Watcher()
    assert train_grpo(config, later).digest == expected.digest
    assert later.begun == [begin]
    forget_what_stays(watcher)


def test_full_temporary_folder_ends_the_job_which_goes_on_in_another(
    small_disk: Path, sft: Callable[..., SFTConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = train_sft(sft(), Silent())
    config = sft(checkpoint_dir=f"{expected.checkpoint_dir}-2", checkpoint_every=1)
    monkeypatch.setattr("tempfile.tempdir", str(small_disk))

    def fill(step: int) -> None:
        if step == 2:
            (small_disk / "ballast").write_bytes(bytes(shutil.disk_usage(small_disk).free - 32_768))

    with pytest.raises(DiskFull, match=f"no space is left .*{small_disk}.* set TMPDIR"):
        train_sft(config, Watcher(fill))
    assert [path.name for path in small_disk.iterdir()] == ["ballast"]
    begin = verified_steps_elsewhere(config.checkpoint_dir, monkeypatch)[-1]
    assert begin == 1
    later = Watcher()
    assert train_sft(config, later).digest == expected.digest
    assert later.begun == [begin]


def verified_steps_elsewhere(url: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    monkeypatch.setattr("tempfile.tempdir", None)
    return verified_steps(url)


def forget_what_stays(watcher: Watcher) -> None:
    for notice in watcher.told:
        if found := re.search(r"stays in (\S+)", notice):
            shutil.rmtree(Path(found[1]).parent)
