"""Small documents at any fsspec URL: read them, and write them whole or not at all.

A store that takes or gives fewer bytes than it should, and says that all is well, is found out here.
"""

from __future__ import annotations

import errno
import json
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from grpo_core.errors import ConfigError, DiskFull, NotFoundError


def write_text(url: str, text: str) -> str:
    """Write a file, making its folder; a reader sees the old file or the new one, never half of it.

    Returns:
        The file's full URL.

    Raises:
        OSError: not all of it arrived.
    """
    fs, path = opened_url(url)
    fs.makedirs(path.rpartition("/")[0], exist_ok=True)
    if isinstance(fs, LocalFileSystem):
        with _unfinished(path, text) as unfinished:
            os.replace(unfinished, path)
    else:  # object stores show an object only once it is whole
        fs.pipe_file(path, text.encode())
        see_that_all_arrived(fs, path, len(text.encode()))
    return str(fs.unstrip_protocol(path))


def create_text(url: str, text: str) -> None:
    """Write a file that must not exist yet, making its folder; of several writers only one succeeds.

    Raises:
        FileExistsError: it exists. Some stores that call themselves S3 do not notice, and overwrite it.
        OSError: not all of it arrived.
    """
    fs, path = opened_url(url)
    fs.makedirs(path.rpartition("/")[0], exist_ok=True)
    if not isinstance(fs, LocalFileSystem):
        fs.pipe_file(path, text.encode(), mode="create")
        see_that_all_arrived(fs, path, len(text.encode()))
        return
    with _unfinished(path, text) as unfinished:
        try:
            os.link(unfinished, path)  # whole and exclusive at once, as no way of opening a file is
        except PermissionError:  # a filesystem without links, such as exFAT
            with open(path, "x", encoding="utf-8") as file:
                file.write(text)


@contextmanager
def _unfinished(path: str, text: str) -> Iterator[Path]:
    """A file beside `path` that holds the whole text and would survive a loss of power; it does not stay."""
    unfinished = Path(f"{path}.{uuid.uuid4().hex}.tmp")
    try:
        unfinished.write_text(text, encoding="utf-8")
        synced(str(unfinished))
        yield unfinished
    finally:
        unfinished.unlink(missing_ok=True)


def see_that_all_arrived(fs: AbstractFileSystem, path: str, size: int) -> None:
    """Compare a file's size in bytes with what was sent to it or came from it.

    Raises:
        OSError: they differ.
    """
    fs.invalidate_cache(path)
    if (stored := fs.size(path)) != size:
        raise OSError(errno.EIO, f"{size} bytes went over the line, {stored} are stored", path)


def synced(path: str) -> None:
    """Wait until a local file would survive a loss of power."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def write_json(url: str, document: dict[str, Any]) -> str:
    """Write one JSON document as `write_text` does."""
    return write_text(url, json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_text(url: str) -> str:
    """The text of a file.

    Raises:
        NotFoundError: there is no such file.
        ConfigError: it is no text, or the URL is of no known kind.
        OSError: not all of it arrived, as far as that shows.
    """
    fs, path = opened_url(url)
    try:
        content: Any = fs.cat_file(path)  # not `open`, which on S3 trusts an old listing
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise NotFoundError(f"there is no file {url!r}") from None
    try:
        return str(content, "utf-8")
    except UnicodeDecodeError:
        see_that_all_arrived(fs, path, len(content))
        raise ConfigError(f"{url!r} is not UTF-8 text") from None


def opened_url(url: str, field: str | None = None) -> tuple[AbstractFileSystem, str]:
    """The filesystem of a URL, and the path on it.

    Args:
        field: of the config that holds the URL, for the error.

    Raises:
        ConfigError: no filesystem of that kind is known or installed.
    """
    try:
        return url_to_fs(url)
    except (ValueError, ImportError) as error:
        raise ConfigError(
            f"{url!r} cannot be opened: {error}", hint="use a path, file://, s3:// or memory://"
        ) from None


def read_json(url: str) -> dict[str, Any]:
    """The JSON document in a file.

    Raises:
        NotFoundError: there is no such file.
        ConfigError, ValueError: it is not JSON.
        OSError: not all of it arrived. No part of a JSON object is JSON, so this always shows.
    """
    text = read_text(url)
    try:
        return json.loads(text)
    except ValueError:
        see_that_all_arrived(*opened_url(url), len(text.encode()))
        raise


@contextmanager
def full_disk_named(place: str, hint: str, field: str | None = None) -> Iterator[None]:
    """Turn "no space left" into an error that says what to do.

    Raises:
        DiskFull: there is none.
    """
    try:
        yield
    except Exception as error:
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        if not (full or f"(os error {errno.ENOSPC})" in str(error)):  # as safetensors says it, which is no OSError
            raise
        message = f"no space is left for a checkpoint in {place}; those that are complete stay valid"
        raise DiskFull(message, field=field, hint=hint) from error
