"""Figures to results.json, tables to the terminal and to the marked places of RESULTS.md."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


class Report:
    """The two files of results in one folder; what is there already stays unless a section replaces it."""

    def __init__(self, folder: Path):
        self._json = folder / "results.json"
        self._markdown = folder / "RESULTS.md"

    def keep(self, section: str, figures: Any) -> None:
        """Replace one section's figures, by one rename: a stopped run loses nothing."""
        stored = json.loads(self._json.read_text()) if self._json.exists() else {}
        staged = self._json.with_suffix(".partial")
        staged.write_text(json.dumps({**stored, section: figures}, indent=1) + "\n")
        os.replace(staged, self._json)

    def show(self, section: str, header: list[str], rows: list[list[str]]) -> None:
        """Rewrite the section's table between its markers.

        Raises:
            ValueError: RESULTS.md has no such markers.
        """
        lines = [header, ["---"] * len(header), *rows]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        between = re.compile(f"(<!-- {section} -->\n).*?(<!-- /{section} -->)", re.DOTALL)
        text = self._markdown.read_text()
        if not between.search(text):
            raise ValueError(f"{self._markdown} has no markers for {section!r}")
        self._markdown.write_text(between.sub(lambda match: f"{match[1]}{table}\n{match[2]}", text))

    @staticmethod
    def print(section: str, header: list[str], rows: list[list[str]]) -> None:
        table = Table(*header, title=section)
        for row in rows:
            table.add_row(*row)
        Console().print(table)
