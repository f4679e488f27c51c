"""One writer per run folder: a lease that its holder renews, and that ends with the holder.

The holder rewrites one small file with a growing count. Whoever wants the folder next decides without comparing the
clocks of two machines: a process of this host is asked whether it still runs; one of another host is watched, and is
taken to be gone when the count stands still for `EXPIRES_AFTER_S`.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from types import TracebackType
from typing import Any, Self

from fsspec.implementations.local import LocalFileSystem

from grpo_core.errors import CheckpointConflict, NotFoundError
from grpo_core.files import create_text, opened_url, read_json, write_text
from grpo_core.processes import Process

logger = logging.getLogger(__name__)

LEASE = "writer.json"
RENEW_EVERY_S = 10.0
EXPIRES_AFTER_S = 60.0
SETTLE_S = 0.5
"""After taking what others may have found free too, how long to wait before looking who has it."""


_held = set[str]()
"""Tokens of this process: a file with another one of this process is what an outage kept from being given back."""


@dataclass(frozen=True)
class Holder:
    """Who writes to a folder.

    Attributes:
        process: a `Process`, as a dictionary. beat: number of renewals.
    """

    token: str
    process: dict[str, Any]
    beat: int = 0


class Lease:
    """The right to write to one folder, held within a ``with`` block."""

    def __init__(
        self,
        folder: str,
        renew_every_s: float = RENEW_EVERY_S,
        expires_after_s: float = EXPIRES_AFTER_S,
        waiting: Callable[[str], None] = logger.warning,
    ):
        """Name the folder; nothing is read or written yet.

        Args:
            folder: any fsspec URL.
            waiting: told, once, that a holder on another host is being watched.
        """
        self._folder = folder
        self._url = f"{folder.rstrip('/')}/{LEASE}"
        self._renew_every_s = renew_every_s
        self._expires_after_s = expires_after_s
        self._waiting = waiting
        self._token = uuid.uuid4().hex
        self._me = Holder(self._token, asdict(Process.this()))
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._renew_until_released, name="lease", daemon=True)

    def __enter__(self) -> Self:
        """Take the lease.

        Raises:
            CheckpointConflict: another process writes to the folder.
        """
        if not self._created():
            self._wait_until_free()
            write_text(self._url, self._text())
            time.sleep(SETTLE_S)  # of several who found it free, the last to write has it
        self.confirm()
        _held.add(self._token)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._released.set()
        self._thread.join()
        _held.discard(self._token)
        try:
            if self._is_mine(self._holder()):
                fs, path = opened_url(self._url)
                fs.rm_file(path)
        except Exception as failure:  # it expires, and must not hide how the run ended
            logger.warning("the lease of %s could not be given back: %s", self._folder, failure)

    def confirm(self) -> None:
        """Make sure that the folder is still this process's: call it before something is put there for good.

        Raises:
            CheckpointConflict: another process has taken it.
        """
        holder = self._holder()
        if holder is None:  # somebody removed the file, perhaps with the folder
            self._created()
            holder = self._holder()
        if not self._is_mine(holder):
            raise self._taken(holder)

    def _is_mine(self, holder: Holder | str | None) -> bool:
        if isinstance(holder, str):  # a renewal of which a store took only a part
            return self._token in holder
        return holder is not None and holder.token == self._token

    def _created(self) -> bool:
        """Whether there was no lease and now there is this one."""
        if self._holder() is not None:  # not left to `create_text`, as not every store refuses to create twice
            return False
        try:
            create_text(self._url, self._text())
        except FileExistsError:
            return False
        if not isinstance(opened_url(self._url)[0], LocalFileSystem):
            time.sleep(SETTLE_S)
        return True

    def _wait_until_free(self) -> None:
        """Return once the holder is known to be gone; raise as soon as it is known to live."""
        seen = self._holder()
        if isinstance(seen, Holder) and (runs := Process(**seen.process).runs()) is not None:
            if runs and (seen.process != self._me.process or seen.token in _held):
                raise self._taken(seen)
            return
        if seen is not None:
            self._waiting(f"{self._folder} is leased elsewhere: watching its holder for {self._expires_after_s:g} s")
        ends = time.monotonic() + self._expires_after_s
        while seen is not None and time.monotonic() < ends:
            time.sleep(min(1.0, self._renew_every_s / 4))
            newest = self._holder()
            if newest is not None and newest != seen:
                raise self._taken(newest)
            seen = newest

    def _renew_until_released(self) -> None:
        while not self._released.wait(self._renew_every_s):
            self._me = replace(self._me, beat=self._me.beat + 1)
            try:
                self.confirm()
                write_text(self._url, self._text())
            except CheckpointConflict:
                return  # the next `confirm` says so where it can be acted upon
            except Exception as error:  # a store that is down for a moment; `confirm` has the last word
                logger.warning("the lease of %s could not be renewed: %s", self._folder, error)

    def _holder(self) -> Holder | str | None:
        """Who holds the lease; the bare text where it cannot be read, None where there is none."""
        try:
            document = read_json(self._url)
        except NotFoundError:
            return None
        except json.JSONDecodeError as error:
            return error.doc
        try:
            return Holder(**document)
        except TypeError:
            return str(document)

    def _text(self) -> str:
        return json.dumps(asdict(self._me))

    def _taken(self, holder: Holder | str | None) -> CheckpointConflict:
        who = Process(**holder.process) if isinstance(holder, Holder) else "another process"
        return CheckpointConflict(
            f"{who} writes to {self._folder}",
            field="checkpoint_dir",
            hint="wait for it, cancel it, or use another folder",
        )
