"""Real servers in processes of their own, which can be stopped, frozen and started again in the middle of a test."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self


class Server:
    """A server on a port of 127.0.0.1 that stays the same when it is started again; a context that starts and stops it.

    Args:
        command: of the module to run, with ``{port}`` for the port.
        health: path that answers once the server is ready.
    """

    def __init__(self, command: Sequence[str], health: str, environment: Mapping[str, str], log: Path):
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = [sys.executable, "-m", *(part.format(port=self.port) for part in command)]
        self._health, self._environment, self._log = health, {**os.environ, **environment}, log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("ab") as log:
            # in a session of its own: both servers are several processes
            self._process = subprocess.Popen(
                self._command, env=self._environment, stdout=log, stderr=log, start_new_session=True
            )
        for _ in range(1200):
            with suppress(OSError), urllib.request.urlopen(self.url + self._health, timeout=5) as answer:
                if answer.status == 200:
                    return
            assert self._process.poll() is None, self._log.read_text()[-3000:]
            time.sleep(0.1)
        raise AssertionError(self._log.read_text()[-3000:])

    def stop(self, number: signal.Signals = signal.SIGKILL) -> None:
        if self._process is not None:
            self.send(number)
            self._process.wait(60)
            with suppress(ProcessLookupError):  # what the first one left
                self.send(signal.SIGKILL)
            self._process = None

    def send(self, number: signal.Signals) -> None:
        """Send a signal to all of the server's processes: SIGSTOP lets it accept calls and never answer."""
        assert self._process is not None
        os.killpg(self._process.pid, number)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def mlflow_server(folder: Path) -> Server:
    folder.mkdir()
    store, artifacts = f"sqlite:///{folder / 'mlflow.db'}", str(folder / "artifacts")
    options = ["--backend-store-uri", store, "--artifacts-destination", artifacts, "--workers", "1"]
    command = ["mlflow", "server", "--host", "127.0.0.1", "--port", "{port}", *options]
    return Server(command, "/health", {}, folder / "log")


def prefect_server(folder: Path) -> Server:
    folder.mkdir()
    command = ["prefect", "server", "start", "--host", "127.0.0.1", "--port", "{port}"]
    return Server(command, "/api/health", {"PREFECT_HOME": str(folder), "PREFECT_API_URL": ""}, folder / "log")
