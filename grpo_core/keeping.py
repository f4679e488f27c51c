"""How a run keeps its checkpoints: alone in its folder, beside training, and no more of them than wanted.

One upload at a time runs in a thread of its own while training goes on. What is no longer wanted is deleted only
after the newer checkpoint is whole.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from grpo_core.checkpoints import MANIFEST, CheckpointStore, Manifest, file_digest
from grpo_core.errors import DiskFull, is_retryable
from grpo_core.files import full_disk_named, write_json
from grpo_core.lease import Lease
from grpo_core.scratch import drop, leave, remove_abandoned

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

RETRY_DELAYS_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Waits between the tries of an upload, each made up to a half longer or shorter by chance."""


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay, beside the first one (the KL may refer to it) and the best on the validation split.

    Attributes:
        last: so many of the newest. every: steps that this number divides; None for no others.
    """

    last: int
    every: int | None = None

    def expendable(self, manifests: Sequence[Manifest]) -> list[int]:
        """Steps that need not stay; of equally good ones on the validation split the earliest is the best."""
        steps = sorted(manifest.step for manifest in manifests)
        stay = {0, *steps[-self.last :], *(step for step in steps if self.every and step % self.every == 0)}
        measured = [manifest for manifest in manifests if "eval/reward" in manifest.validation]
        if measured:
            stay.add(max(measured, key=lambda each: (each.validation["eval/reward"], -each.step)).step)
        return [step for step in steps if step not in stay]


class Keeper:
    """The one writer of a run's folder, within a ``with`` block, which waits at its end for what is on its way."""

    def __init__(self, store: CheckpointStore, retention: Retention, notice: Callable[[str], None] = logger.warning):
        """Name folder and rules; nothing is read or written yet.

        Args:
            notice: told what a person who watches should know: tries that failed, files that could not be deleted.
        """
        self._store = store
        self._retention = retention
        self._notice = notice
        self._lease = Lease(store.url, waiting=notice)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def __enter__(self) -> Self:
        """Become the folder's writer; what killed processes left in the temporary folder goes.

        Raises:
            CheckpointConflict: another process writes to it.
            DiskFull: there is no space left in it.
        """
        with self._full_disk_named():
            self._lease.__enter__()
        remove_abandoned()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.join()
        except Exception as failure:
            if error is None:
                raise
            self._notice(str(failure))  # the first error is the one to show
        finally:
            self._thread.shutdown()
            self._lease.__exit__(kind, error, trace)

    def keep(self, folder: Path, manifest: Manifest) -> None:
        """Upload a staged folder while training goes on; it is this object's from now on, and gone when uploaded.

        Args:
            folder: of `scratch.staged`.
            manifest: without the digests of its files.

        Raises:
            Exception: the upload before this one failed in the end; this one's folder stays like that one's.
        """
        try:
            self.join()
        except Exception:
            self._leave(folder, _with_digests(folder, manifest))
            raise
        self._pending = self._thread.submit(self._upload, folder, manifest)

    def join(self) -> None:
        """Wait until everything given to `keep` is in the store.

        Raises:
            CheckpointConflict: another process has taken the folder.
            DiskFull: there is no space left.
            Exception: whatever the store answered at the last try.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def mark(self, step: int, partial: bool) -> None:
        """Say of a checkpoint whether its run stopped there."""
        self.join()
        manifest = self._persistently(lambda: self._store.complete(step))
        self._persistently(lambda: self._store.mark(manifest, partial))

    def finish(self, policy_files: Path, result: dict[str, object]) -> None:
        """Put final policy and result into the folder: see `CheckpointStore.finish`."""
        self.join()
        self._persistently(lambda: self._store.finish(policy_files, result))

    def tidy(self) -> None:
        """Delete what need not stay: leftovers of killed writers, and what `Retention` calls expendable."""
        try:
            self._lease.confirm()
            for step in self._retention.expendable(self._store.manifests()):
                self._store.remove(step)
            self._store.remove_incomplete()
        except Exception as error:  # tried again after the next checkpoint
            self._notice(f"old checkpoints in {self._store.url} could not be deleted: {error}")

    def _upload(self, folder: Path, manifest: Manifest) -> None:
        manifest = _with_digests(folder, manifest)
        try:
            self._persistently(lambda: self._store.save(folder, manifest))
        except Exception as error:
            self._leave(folder, manifest)
            if isinstance(error, DiskFull):
                self.tidy()  # half a checkpoint needs space too
            raise
        drop(folder)
        self.tidy()

    def _leave(self, folder: Path, manifest: Manifest) -> None:
        """Let what could not be uploaded stay here as a whole checkpoint, and say where."""
        with suppress(OSError):  # a full disk: it stays without manifest
            write_json(str(folder / MANIFEST), manifest.__dict__)
        leave(folder)
        self._notice(f"the checkpoint of step {manifest.step} is not in {self._store.url}; it stays in {folder}")

    def _full_disk_named(self) -> AbstractContextManager[None]:
        hint = "free some space, or lower keep_last; started again, the job resumes from the last checkpoint"
        return full_disk_named(self._store.url, hint, "checkpoint_dir")

    def _persistently(self, work: Callable[[], _T]) -> _T:
        """Work with the store, again and again with growing waits while another try may help."""
        delays_s = iter(RETRY_DELAYS_S)
        while True:
            try:
                with self._full_disk_named():
                    self._lease.confirm()
                    return work()
            except Exception as error:
                delay_s = next(delays_s, None)
                if delay_s is None or not is_retryable(error):
                    raise
                self._notice(f"{self._store.url} does not answer as it should ({error}); trying again")
                time.sleep(delay_s * random.uniform(0.5, 1.5))


def _with_digests(folder: Path, manifest: Manifest) -> Manifest:
    """The manifest, with the digests of all files in its folder."""
    return replace(manifest, files={path.name: file_digest(path) for path in sorted(folder.iterdir())})
