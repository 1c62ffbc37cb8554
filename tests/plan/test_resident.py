"""The tracer against the kernel's books: what a process really needed at most."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.plan.resident_step import agree

REPOSITORY = Path(__file__).parents[2]
STEP = Path(__file__).with_name("resident_step.py")
# Freed blocks above 64 KiB go back to the kernel at once, so that its high-water mark is that of live tensors.
GLIBC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_TOP_PAD_": "0"}


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's books are those of Linux")
@pytest.mark.parametrize(("scheme", "dtype"), [("laga", "float32"), ("explicit", "float32"), ("absorbed", "bfloat16")])
def test_the_traced_peak_is_the_resident_high_water_mark_of_a_process(scheme, dtype):
    paths = os.pathsep.join([str(REPOSITORY / "src"), str(REPOSITORY)])
    environment = {**os.environ, **GLIBC, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, str(STEP), scheme, dtype], env=environment, capture_output=True, text=True, timeout=200,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    resident, traced = done.stdout.split()
    if resident == "None":
        pytest.skip("this kernel does not let a process reset its high-water mark")
    assert int(traced) > 64 * 2**20
    assert agree(int(resident), int(traced)), f"{resident} resident, {traced} traced"
