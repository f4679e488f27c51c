"""Every error the project raises on purpose.

    LabError                     code and exit code; names the field, the value and what to do
    ├── ConfigError              the request is wrong                              exit 2
    ├── AdmissionRefused         the request is valid but may not be started here  exit 3
    ├── NotFoundError            a thing that the request names does not exist     exit 4
    ├── CheckpointError          a checkpoint cannot be used as asked              exit 2
    │   ├── CheckpointCorrupt    bytes are not those that were written             exit 1
    │   ├── CheckpointConflict   the folder belongs to another run
    │   └── DiskFull             there is no space left for one                    exit 1
    └── TrainingFailed           the run cannot end as a success                   exit 1

Anything else that escapes (a lost file, a crashed process) is not in this tree and may
be retried: `is_retryable` is the one place that decides.
"""

from __future__ import annotations

from typing import Any

from grpo_core.progress import StopNow


class LabError(Exception):
    """Base of all errors raised on purpose.

    Attributes:
        message: what is wrong, with the value; without the field's name, which `field` holds.
        code: stable machine-readable name, for example ``CONFIG_INVALID``.
        field: dotted path of the offending field, or None.
        hint: what to do about it.
        exit_code: exit status of the command line when this error ends it.
    """

    code = "LAB_ERROR"
    exit_code = 1

    def __init__(self, message: str, *, field: str | None = None, hint: str | None = None, code: str | None = None):
        super().__init__(message)
        self.message = message
        self.field = field
        self.hint = hint
        if code is not None:
            self.code = code

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions cross process borders (Prefect results, pools); the default reduces to positional args only.
        return _rebuild, (type(self), self.message, self.field, self.hint, self.code)

    def __str__(self) -> str:
        named = f"{self.field}: {self.message}" if self.field else self.message
        return f"{named} ({self.hint})" if self.hint else named

    def as_dict(self) -> dict[str, str | None]:
        """The error as the doors print it: ``{"code", "message", "hint", "field"}``."""
        return {"code": self.code, "message": self.message, "hint": self.hint, "field": self.field}


def _rebuild(cls: type[LabError], message: str, field: str | None, hint: str | None, code: str) -> LabError:
    return cls(message, field=field, hint=hint, code=code)


class ConfigError(LabError):
    """The request cannot be honoured as written; nothing was started."""

    code = "CONFIG_INVALID"
    exit_code = 2


class AdmissionRefused(LabError):
    """The request is valid, but this machine or its limits do not admit it; nothing was started."""

    code = "ADMISSION_REFUSED"
    exit_code = 3


class NotFoundError(LabError):
    """A job, file or folder that the request names does not exist."""

    code = "NOT_FOUND"
    exit_code = 4


class CheckpointError(LabError):
    """A checkpoint cannot be used as asked."""

    code = "CHECKPOINT_UNUSABLE"
    exit_code = 2


class CheckpointCorrupt(CheckpointError):
    """A checkpoint's bytes are not those that were written."""

    code = "CHECKPOINT_CORRUPT"
    exit_code = 1


class CheckpointConflict(CheckpointError):
    """A checkpoint folder belongs to another process, or to a run with other config, inputs or numeric layout."""

    code = "CHECKPOINT_CONFLICT"


class DiskFull(CheckpointError):
    """There is no space left for a checkpoint; those that are complete stay valid."""

    code = "DISK_FULL"
    exit_code = 1


class TrainingFailed(LabError):
    """Training ended without a usable result: non-finite numbers, or a policy that did not change."""

    code = "TRAINING_FAILED"


def is_retryable(error: BaseException) -> bool:
    """Whether starting the same work again may succeed: not after an error raised on purpose, nor after a stop."""
    return isinstance(error, Exception) and not isinstance(error, LabError | StopNow)
