"""Keep freed memory for the next training step instead of giving it back to the system."""

from __future__ import annotations

import ctypes
import platform

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


def keep_freed_memory() -> None:
    """Let glibc keep blocks below 1 GiB that are freed; elsewhere nothing is done.

    A step on a CPU allocates and frees the same tensors each time. By default glibc returns large ones at once, and
    their pages are faulted in and zeroed again: 5 to 15 % of a step. Settings of one's own in the environment
    (MALLOC_MMAP_THRESHOLD_, MALLOC_TRIM_THRESHOLD_) are overridden.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(_M_MMAP_THRESHOLD, 2**30)
    mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
