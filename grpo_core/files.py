"""Small documents at any fsspec URL: read them, and write them whole or not at all."""

from __future__ import annotations

import json
import os
import uuid
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from grpo_core.errors import ConfigError, NotFoundError


def write_text(url: str, text: str) -> str:
    """Write a file, making its folder; a reader sees the old file or the new one, never half of it.

    Returns:
        The file's full URL.
    """
    fs, path = opened_url(url)
    fs.makedirs(path.rpartition("/")[0], exist_ok=True)
    if isinstance(fs, LocalFileSystem):
        os.replace(_unfinished(fs, path, text), path)
    else:  # object stores show an object only once it is whole
        fs.pipe_file(path, text.encode())
    return str(fs.unstrip_protocol(path))


def create_text(url: str, text: str) -> None:
    """Write a file that must not exist yet, making its folder; of several writers only one succeeds.

    Raises:
        FileExistsError: it exists.
    """
    fs, path = opened_url(url)
    fs.makedirs(path.rpartition("/")[0], exist_ok=True)
    if not isinstance(fs, LocalFileSystem):
        fs.pipe_file(path, text.encode(), mode="create")
        return
    unfinished = _unfinished(fs, path, text)
    try:
        os.link(unfinished, path)  # whole and exclusive at once, as no way of opening a file is
    except PermissionError:  # a filesystem without links, such as exFAT
        with open(path, "x", encoding="utf-8") as file:
            file.write(text)
    finally:
        os.unlink(unfinished)


def _unfinished(fs: LocalFileSystem, path: str, text: str) -> str:
    """Path of a file beside `path` that holds the whole text and would survive a loss of power."""
    unfinished = f"{path}.{uuid.uuid4().hex}.tmp"
    fs.pipe_file(unfinished, text.encode())
    synced(unfinished)
    return unfinished


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
    """
    fs, path = opened_url(url)
    try:
        content: Any = fs.cat_file(path)  # not `open`, which on S3 trusts an old listing
        return str(content, "utf-8")
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise NotFoundError(f"there is no file {url!r}") from None
    except UnicodeDecodeError:
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
        ValueError: it is not JSON.
    """
    return json.loads(read_text(url))
