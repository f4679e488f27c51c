"""How the outside asks a running job to stop: Ctrl-C, a termination signal, or a tag on its flow run.

The first signal asks for a stop, a later one ends the process. Ctrl-C raises nothing: a stage that is just ending
or saving goes on, and its document is kept. A termination signal still comes as Prefect's exception, because
Prefect acknowledges a cancellation to the worker that asked for it only while its own handler is in place. The tag
is for whoever cannot or should not send signals: Prefect's own cancellation kills a process 30 s after it asked.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from contextvars import copy_context
from types import FrameType, TracebackType
from typing import Any, Self
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.exceptions import TerminationSignal
from prefect.futures import PrefectFuture

from grpo_core.progress import StopReason
from tasks.monitoring import StopFlag, announce
from tasks.places import CANCEL_TAG

logger = logging.getLogger(__name__)

HEARD = (
    "stopping: what is finished is saved first; "
    "interrupt again to end the process at once, which keeps only the last checkpoint"
)
TOLD = "stopping, as was asked: what is finished is saved first"
ASKED_EVERY_S = 2.0

# Wrappers (uv, make) pass on the signal that the terminal has sent to the whole group already.
SAME_WISH_S = 1.0


class Interrupts:
    """A context in which interrupts raise `stop` instead of tearing the job down.

    Python hands signals to the main thread only; in another one this does nothing.
    """

    def __init__(self, stop: StopFlag):
        self._stop = stop
        self._heard_at: float | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._take(signal.SIGINT)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def wait(self, future: PrefectFuture[Any]) -> Any:
        """The future's result, also when a termination signal arrives before it.

        Raises:
            Exception: whatever the future's work raised.
        """
        try:
            return future.result()
        except TerminationSignal:
            # Weights may be half updated in the other thread: only the loop itself knows when to save.
            self._take(signal.SIGTERM)
            self._hear(signal.SIGTERM, None)
            return future.result()

    def _take(self, number: signal.Signals) -> None:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup and shells set it for background jobs
            self._before[number] = signal.signal(number, self._hear)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self._heard_at is None:
            self._heard_at = time.monotonic()
            self._stop.request(StopReason.CANCELLED)
            # In a thread: the code that this signal interrupted may hold a lock that logging needs.
            threading.Thread(target=copy_context().run, args=(announce, HEARD)).start()
        elif time.monotonic() - self._heard_at > SAME_WISH_S:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


class CancelTag:
    """A context in which the tag `CANCEL_TAG` on the flow run raises `stop`."""

    def __init__(self, stop: StopFlag, flow_run_id: UUID):
        self._stop = stop
        self._flow_run_id = flow_run_id
        self._over = threading.Event()
        # The context carries the watchers that are told, and Prefect's settings.
        self._thread = threading.Thread(target=copy_context().run, args=(self._watch,), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join(ASKED_EVERY_S)  # it may be waiting, for a minute, for an API that is away

    def _watch(self) -> None:
        with get_client(sync_client=True) as client:
            while not self._over.wait(ASKED_EVERY_S):
                try:
                    asked = CANCEL_TAG in client.read_flow_run(self._flow_run_id).tags
                except Exception as error:  # an API that is away for a while stops no job
                    logger.debug("the flow run cannot be read: %s", error)
                    continue
                if asked:
                    self._stop.request(StopReason.CANCELLED)
                    announce(TOLD)
                    return
