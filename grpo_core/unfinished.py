"""What an unfinished evaluation keeps beside its result to come, so that another call goes on behind it.

One small document per finished batch, since object stores cannot append::

    evaluation.unfinished/000001.json
        {"evaluation": what its numbers depend on, "batch": digest of its prompts, "items": [...]}

Each is written whole or not at all and says what it belongs to, so nothing that another evaluation left is ever
taken for a part of this one: it counts as not there, and is overwritten.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from grpo_core.errors import ConfigError, NotFoundError
from grpo_core.files import opened_url, read_json, write_json
from grpo_core.results import ItemResult, Result

FOLDER = "evaluation.unfinished"


class _Batch(Result):
    evaluation: dict[str, Any]
    batch: str
    items: list[ItemResult]


class FinishedBatches:
    """The scored items of one evaluation's finished batches, below its `output_dir`."""

    def __init__(self, output_dir: str, evaluation: dict[str, Any]):
        """Name the place; nothing is read or written yet.

        Args:
            evaluation: what the numbers of all batches depend on, as JSON holds it.
        """
        self._folder = f"{output_dir.rstrip('/')}/{FOLDER}"
        self._evaluation = evaluation

    def leading(self, batches: Sequence[str]) -> list[list[ItemResult]]:
        """Items of the first batches, up to the first one that is not there: they are finished in order.

        Args:
            batches: the digest of every batch.
        """
        found = []
        for number, batch in enumerate(batches, start=1):
            if (items := self._read(number, batch)) is None:
                break
            found.append(items)
        return found

    def add(self, number: int, batch: str, items: Sequence[ItemResult]) -> None:
        """Keep one finished batch, by its 1-based number.

        Raises:
            OSError: the store did not take it.
        """
        kept = _Batch(evaluation=self._evaluation, batch=batch, items=list(items))
        write_json(self._url(number), kept.document())

    def remove(self) -> None:
        """Delete the folder, whatever evaluation's batches it holds.

        Raises:
            OSError: the store did not delete it.
        """
        fs, path = opened_url(self._folder)
        fs.invalidate_cache()
        with suppress(FileNotFoundError):  # asked first, a store in trouble would say that there is none
            fs.rm(path, recursive=True)

    def _read(self, number: int, batch: str) -> list[ItemResult] | None:
        try:
            kept = _Batch.model_validate(read_json(self._url(number)))
        except (NotFoundError, ConfigError, ValueError):
            return None  # not written yet, or broken
        return kept.items if (kept.evaluation, kept.batch) == (self._evaluation, batch) else None

    def _url(self, number: int) -> str:
        return f"{self._folder}/{number:06d}.json"
