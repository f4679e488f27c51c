"""The lab's home: the one folder under which everything lives that nobody placed elsewhere."""

from __future__ import annotations

import os
from pathlib import Path


def lab_home() -> Path:
    """``LAB_HOME``, or ``~/.grpo-lab``."""
    return Path(os.environ.get("LAB_HOME", "~/.grpo-lab")).expanduser().absolute()
