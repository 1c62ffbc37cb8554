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
    for _ in range(8):
        torch.ones(2**24)  # 64 MiB: more than glibc would ever keep by itself
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

fresh = pages()
for call in {calls}:
    getattr(malloc, call)()
pages()
print(fresh, pages())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the C library must be glibc")
@pytest.mark.parametrize("last", ["keep_freed_memory", "return_freed_memory"])
def test_the_last_call_says_whether_pages_come_again(last):
    calls = ("keep_freed_memory", "return_freed_memory", last)
    program = FAULTS.format(calls=calls)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    fresh, pages = map(int, done.stdout.split())
    # Kept memory may have to grow for one tensor where something small has come to lie in it.
    assert pages < 0.3 * fresh if last == "keep_freed_memory" else pages > 0.9 * fresh
