from __future__ import annotations

import sys

import pytest
import torch

from laga_attn.bench import resident
from laga_attn.bench.resident import resident_growth

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


def test_where_the_kernel_keeps_no_such_books_there_is_no_number(monkeypatch, tmp_path):
    ran = []
    monkeypatch.setattr(resident, "_STATUS", tmp_path / "none")
    assert resident_growth(lambda: ran.append(1)) is None
