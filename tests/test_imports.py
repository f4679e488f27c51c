"""A door opens at once: configurations and the command line load no heavy library.

Each check runs in a fresh interpreter, since this one may have loaded anything. The direction of imports
between the packages is checked by import-linter (`make lint`).
"""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = {"torch", "transformers", "peft", "scipy", "prefect", "mlflow"}

HELP = """
import sys
from lab.cli import main
sys.argv = ["lab", "--help"]
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
"""


def top_level_modules(code: str) -> tuple[set[str], str]:
    """Names of the top-level modules loaded once `code` has run in a fresh interpreter, and what it printed."""
    report = "\nimport sys\nprint('\\n' + ' '.join(name for name in sys.modules if '.' not in name), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code + report], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.splitlines()[-1].split()), done.stdout


@pytest.mark.parametrize(
    "module",
    [
        "lab",
        "lab.cli",
        "grpo_core.config",
        "grpo_core.results",
        "grpo_core.progress",
        "grpo_core.compute.preview",
        "tasks.places",
        "tasks.tracking",
    ],
)
def test_importing_a_door_loads_nothing_heavy(module: str) -> None:
    loaded, _ = top_level_modules(f"import {module}")
    assert module.split(".")[0] in loaded
    assert loaded & HEAVY == set()


def test_help_loads_nothing_heavy() -> None:
    loaded, printed = top_level_modules(HELP)
    assert "pipeline" in printed
    assert loaded & HEAVY == set()
