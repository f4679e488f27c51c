import platform
import subprocess
import sys

import pytest

FAULTS = """
import ctypes, resource
from grpo_core.allocator import keep_freed_memory

keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
size = 64 * 2**20  # above glibc's largest default threshold, 32 MiB: given back at once unless told otherwise

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = ctypes.c_void_p(libc.malloc(ctypes.c_size_t(size)))
    ctypes.memset(block, 1, size)
    libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
print(faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these settings")
def test_memory_freed_by_one_step_is_there_for_the_next() -> None:
    # given back and faulted in again it would be a fault for each of 16,384 pages of 4 KiB, 32 for huge ones
    answer = subprocess.run([sys.executable, "-c", FAULTS], check=True, capture_output=True, text=True)
    assert int(answer.stdout) < 16
