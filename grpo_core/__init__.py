"""The machine-learning library of grpo-lab: environments, policies, training loops, evaluation, lift.

It knows no orchestrator, no tracking server and no door; those live in `tasks`, `flows` and `lab`.
Importing this package loads neither torch nor transformers.
"""

__version__ = "0.1.0"
