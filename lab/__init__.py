"""The doors of grpo-lab: the command line today. Importing this package loads nothing heavy."""

from grpo_core import __version__

__all__ = ["__version__"]
