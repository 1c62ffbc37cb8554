from __future__ import annotations

import subprocess
import sys

import pytest

FAULTS = """
import resource
import torch
from laga_attn.bench import malloc

def pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        torch.ones(2**24)  # 64 MiB: more than glibc would ever keep by itself
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

for call in {calls}:
    getattr(malloc, call)()
pages()
print(pages())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the C library must be glibc")
@pytest.mark.parametrize("last", ["keep_freed_memory", "return_freed_memory"])
def test_the_last_call_says_whether_pages_come_again(last):
    calls = ("keep_freed_memory", "return_freed_memory", last)
    program = FAULTS.format(calls=calls)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    pages = int(done.stdout)
    assert pages < 16 if last == "keep_freed_memory" else pages >= 4 * 32  # which is 32 where pages are of 2 MiB
