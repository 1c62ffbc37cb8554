from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from laga_attn.bench import resident
from laga_attn.bench.grid import Cell, Variant
from laga_attn.bench.ranks import run_on_ranks
from laga_attn.bench.resident import resident_growth
from laga_attn.bench.run import Task, resident_on_rank, run_rank

MIB = 2**20


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's books are those of Linux")
def test_memory_counts_at_its_highest_even_if_it_is_gone_at_the_end():
    def step() -> None:
        for size in (16, 48, 8):
            torch.ones(size * MIB // 4)

    step()
    growth = resident_growth(step)
    assert growth is not None
    assert 44 * MIB <= growth <= 80 * MIB
    small = resident_growth(lambda: torch.ones(MIB // 4))
    assert small is not None
    assert small <= 16 * MIB  # the peak before does not count again


GAPS = f"""
import torch
from laga_attn.bench.malloc import return_freed_memory
from laga_attn.bench.resident import resident_growth

def step():
    between = []
    for size in range(8, 16):  # none fits into the gap that the one before it has left
        block = torch.ones(size * {MIB} // 4)
        between.append(torch.ones({MIB} // 2))
        del block

return_freed_memory()
torch.ones(30 * {MIB} // 4)  # from then on glibc by itself takes what is smaller from its heap
step()
print(resident_growth(step))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's books are those of Linux")
def test_gaps_between_tensors_do_not_count():
    done = subprocess.run([sys.executable, "-c", GAPS], capture_output=True, text=True, check=True)
    assert 29 * MIB <= int(done.stdout) <= (15 + 8 * 2 + 6) * MIB  # at the end live 8 of 2 and one of 15 MiB


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's books are those of Linux")
def test_what_a_contestant_takes_is_what_its_tensors_need_whoever_came_before():
    variants = (Variant("explicit", 2, "kv"), Variant("laga", 2, "latent"), Variant("laga", 2, "kv"))
    task = Task(((Cell(2, 2048, 16, "bf16"), variants),), 1, "cpu", "auto", (), overlap=False)
    (traced,), _ = run_on_ranks(run_rank, 2, task)
    for (grown,) in run_on_ranks(resident_on_rank, 2, task):
        assert grown.keys() == traced.usage.keys()
        for name, usage in traced.usage.items():
            # Less where a buffer is there, but nothing has arrived in it yet.
            assert 0.5 * usage.peak < grown[name] < 1.1 * usage.peak


def test_where_the_kernel_keeps_no_such_books_there_is_no_number(monkeypatch, tmp_path):
    ran = []
    monkeypatch.setattr(resident, "_STATUS", tmp_path / "none")
    assert resident_growth(lambda: ran.append(1)) is None
