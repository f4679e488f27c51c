"""The checkpoint store of one training run, over fsspec.

A run's folder, which may be any fsspec URL::

    step-000000/        the policy as training began (the reference that the KL may refer to)
    step-000010/        policy files, optimizer.safetensors, state.json, metrics.jsonl and, written last, manifest.json
    adapter_config.json, adapter_model.safetensors     the final policy, once the run is complete
    result.json         the result of a complete run, written after everything else
    writer.json         who writes here at the moment (`lease.py`)

A folder without a valid manifest is no checkpoint. Tensors are safetensors, the rest is JSON.
Whether a job may go on in a folder is in `continuation.py`, how it does in `training.py`, how checkpoints get here
and which of them stay in `keeping.py`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from grpo_core.errors import CheckpointConflict, CheckpointCorrupt, CheckpointError, ConfigError, NotFoundError
from grpo_core.files import opened_url, read_json, see_that_all_arrived, synced, write_json
from grpo_core.scratch import drop, staged

FORMAT_VERSION = 2
MANIFEST = "manifest.json"
RESULT = "result.json"
_STEP = re.compile(r"step-(\d{6,})$")


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself.

    Attributes:
        config: resolved config of the job, without its `checkpoint_dir`.
        layout: what exact continuation depends on (dtype, device, libraries, micro-batching).
        files: SHA-256 of every file by name.
        inputs: digests of what the config only names: the initial adapter, the dataset, the base weights.
        parent: step of the checkpoint that this one continued from, or None.
        run_id: the same in all checkpoints of one run, whatever jobs and machines it went over.
        validation: what this policy earned on the validation split (``eval/reward``); empty if not measured.
    """

    step: int
    kind: str
    partial: bool
    config: dict[str, Any]
    layout: dict[str, Any]
    digest: str
    files: dict[str, str]
    parent: int | None
    inputs: dict[str, str]
    run_id: str
    validation: dict[str, float] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION


class CheckpointStore:
    """Checkpoints of one run under one URL."""

    def __init__(self, url: str):
        self._fs, root = opened_url(url)
        self._root = root.rstrip("/")
        self.url = self._root if isinstance(self._fs, LocalFileSystem) else str(self._fs.unstrip_protocol(self._root))

    def steps(self) -> list[int]:
        """Steps that have a readable manifest, ascending by number."""
        return [manifest.step for manifest in self.manifests()]

    def manifests(self) -> list[Manifest]:
        """Manifests of all complete checkpoints, ascending by step."""
        return [manifest for step in self._folders() if (manifest := self.manifest(step))]

    def latest(self) -> Manifest | None:
        """The newest complete checkpoint."""
        return next((manifest for step in reversed(self._folders()) if (manifest := self.manifest(step))), None)

    def manifest(self, step: int) -> Manifest | None:
        """The manifest of one checkpoint; None where there is no complete one.

        Raises:
            CheckpointError: it is of a format that this version does not read.
        """
        content = self._read_json(f"{self._folder(step)}/{MANIFEST}")
        if content is None:
            return None
        if content.get("format_version") != FORMAT_VERSION:
            message = f"{self.url}/step-{step:06d} has format version {content.get('format_version')!r}"
            raise CheckpointError(message, hint=f"this version reads {FORMAT_VERSION}")
        return Manifest(**content)

    def complete(self, step: int) -> Manifest:
        """The manifest of a checkpoint that is there.

        Raises:
            NotFoundError: it is not.
        """
        if (manifest := self.manifest(step)) is None:
            raise NotFoundError(f"{self.url} has no complete checkpoint of step {step}", field="checkpoint_dir")
        return manifest

    def save(self, source: Path, manifest: Manifest) -> None:
        """Upload a staged local folder as a checkpoint; its manifest goes last. May be called again after an error.

        Raises:
            CheckpointConflict: another complete checkpoint of that step is there, so another run writes here too.
            OSError: the store did not take it all.
        """
        folder = self._folder(manifest.step)
        if (existing := self.manifest(manifest.step)) is not None:
            if existing == manifest:
                return  # an earlier call whose answer was lost
            message = f"{self.url} already has a checkpoint of step {manifest.step}: another run writes to this folder"
            raise CheckpointConflict(message, field="checkpoint_dir", hint="wait for it, or use another folder")
        self._fs.makedirs(folder, exist_ok=True)
        for name in manifest.files:
            self._put(source / name, f"{folder}/{name}")
        self._write_json(f"{folder}/{MANIFEST}", manifest.__dict__)

    def remove(self, step: int) -> None:
        """Delete a checkpoint, its manifest first: whoever looks meanwhile finds it whole or not at all."""
        with suppress(FileNotFoundError):  # asked first, a store in trouble would say that there is none
            self._fs.rm_file(f"{self._folder(step)}/{MANIFEST}")
        with suppress(FileNotFoundError):  # an object store's folder, gone with its last file
            self._fs.rm(self._folder(step), recursive=True)

    def remove_incomplete(self) -> None:
        """Delete what killed writers left behind; only for the folder's one writer."""
        for step in self._folders():
            if self.manifest(step) is None:
                self.remove(step)

    def mark(self, manifest: Manifest, partial: bool) -> None:
        """Say of a complete checkpoint whether its run stopped there. May be called again after an error."""
        marked = replace(manifest, partial=partial)
        if self.manifest(manifest.step) != marked:
            self._write_json(f"{self._folder(manifest.step)}/{MANIFEST}", marked.__dict__)

    @contextmanager
    def opened(self, step: int) -> Iterator[Path]:
        """A verified local copy of a checkpoint's files.

        Raises:
            NotFoundError: there is no such checkpoint.
            CheckpointCorrupt: bytes are not those of the manifest.
            OSError: the store did not give it all.
        """
        manifest = self.complete(step)
        with staged() as folder:
            for name, digest in manifest.files.items():
                _get(self._fs, f"{self._folder(step)}/{name}", folder / name)
                if file_digest(folder / name) != digest:
                    raise CheckpointCorrupt(
                        f"{self.url}/step-{step:06d}/{name} differs from its manifest's digest",
                        field="checkpoint_dir",
                        hint="take an earlier checkpoint (URL/step-NNNNNN), or train again in a new folder",
                    )
        try:
            yield folder
        finally:
            drop(folder)

    def result(self) -> dict[str, Any] | None:
        """The stored result of a complete run."""
        return self._read_json(f"{self._root}/{RESULT}")

    def finish(self, policy_files: Path, result: dict[str, Any]) -> None:
        """Put the final policy's files into the run's folder and write its result last."""
        for path in sorted(policy_files.iterdir()):
            self._put(path, f"{self._root}/{path.name}")
        self._write_json(f"{self._root}/{RESULT}", result)

    def reopen(self) -> None:
        """Take back the result of a complete run that is being extended, then its final policy, as far as there."""
        latest = self.latest()
        for name in (RESULT, *(latest.files if latest else ())):
            with suppress(FileNotFoundError):
                self._fs.rm_file(f"{self._root}/{name}")

    def _folder(self, step: int) -> str:
        return f"{self._root}/step-{step:06d}"

    def _folders(self) -> list[int]:
        """Steps of all checkpoint folders, complete or not, ascending by number."""
        self._fs.invalidate_cache()
        try:
            names = [path.rstrip("/") for path in self._fs.ls(self._root, detail=False)]
        except (FileNotFoundError, NotADirectoryError):  # and no other error: a store in trouble is not an empty one
            return []
        return sorted(int(match[1]) for name in names if (match := _STEP.search(name)))

    def _put(self, source: Path, path: str) -> None:
        """Upload one file and see that all of it arrived.

        Raises:
            OSError: it did not.
        """
        self._fs.put_file(str(source), path)
        see_that_all_arrived(self._fs, path, source.stat().st_size)
        if isinstance(self._fs, LocalFileSystem):  # before a manifest that says it is there
            synced(path)

    def _read_json(self, path: str) -> dict[str, Any] | None:
        try:
            content = read_json(self._fs.unstrip_protocol(path))
        except (NotFoundError, ConfigError, ValueError):
            return None  # never written, or its writer was killed: either way not complete
        return content if isinstance(content, dict) else None

    def _write_json(self, path: str, content: dict[str, Any]) -> None:
        write_json(self._fs.unstrip_protocol(path), content)


@contextmanager
def policy_folder(url: str, field: str = "checkpoint_dir") -> Iterator[Path]:
    """A local copy of the policy files that a URL names.

    The URL may be a training run's folder (its newest complete checkpoint is taken), one checkpoint of
    it, or a plain adapter directory from elsewhere. A `CheckpointError` raised within names the URL and
    the config's `field` that holds it.

    Raises:
        NotFoundError: there is nothing of the kind.
        CheckpointCorrupt: bytes are not those of the manifest.
    """
    try:
        with _policy_files(CheckpointStore(url), field) as folder:
            yield folder
    except CheckpointError as error:
        raise type(error)(f"{url}: {error.message}", field=field, hint=error.hint) from error


def policy_manifest(url: str) -> Manifest | None:
    """The manifest of the checkpoint that `policy_folder` takes; None for an adapter directory from elsewhere."""
    found = _named_checkpoint(CheckpointStore(url))
    return found[0].manifest(found[1]) if found else None


@contextmanager
def _policy_files(store: CheckpointStore, field: str) -> Iterator[Path]:
    if found := _named_checkpoint(store):
        run, step = found
        with run.opened(step) as folder:
            yield folder
    else:
        fs, root = opened_url(store.url)
        try:
            paths = fs.ls(root, detail=False)
        except FileNotFoundError:
            paths = [root]
        if paths == [root]:  # nothing there, or a file
            raise NotFoundError(f"there is no checkpoint folder {store.url!r}", field=field)
        with staged() as folder:
            for path in paths:
                if not fs.isdir(path):
                    _get(fs, path, folder / path.rpartition("/")[2])
        try:
            yield folder
        finally:
            drop(folder)


def _get(fs: AbstractFileSystem, path: str, local: Path) -> None:
    """Download one file.

    Raises:
        OSError: not all of it arrived.
    """
    fs.get_file(path, str(local))
    see_that_all_arrived(fs, path, local.stat().st_size)


def _named_checkpoint(store: CheckpointStore) -> tuple[CheckpointStore, int] | None:
    """The run and the step that are meant by a run's folder or one checkpoint's; None for any other folder."""
    if latest := store.latest():
        return store, latest.step
    parent, _, name = store.url.rpartition("/")
    match = _STEP.search(name)
    return (CheckpointStore(parent), int(match[1])) if match else None


def file_digest(path: Path) -> str:
    """SHA-256 of a local file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
