"""What is measured around a step; the GPU's side with a counting stand-in for its allocator."""

from __future__ import annotations

import torch

from laga_attn.bench import measure
from laga_attn.bench.grid import Cell
from laga_attn.bench.run import make_inputs


def test_on_a_gpu_the_peak_is_the_allocators_over_what_was_there_before(monkeypatch):
    allocator = {"now": 100, "peak": 900}

    def step() -> None:
        allocator["peak"] = allocator["now"] + 250

    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: allocator["now"])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: allocator["peak"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: allocator.update(peak=allocator["now"]))
    assert measure._peak_on_gpu(step) == 250


def test_on_a_cpu_the_peak_counts_tensors_of_the_step_alone():
    before = torch.zeros(1000)
    assert measure._peak_on_cpu(lambda: before + 1) == before.nbytes


def test_inputs_are_the_same_in_every_run_differ_between_ranks_and_share_the_weight():
    cell = Cell(2, 16, 2, "bf16")
    first, again, other = (make_inputs(cell, rank, torch.device("cpu")) for rank in (0, 0, 1))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert torch.equal(first.weight, other.weight)
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True) if a is not first.weight)
    assert [t.requires_grad for t in first] == [True, True, True, True, False]
    assert all(0.5 < float(t.detach().float().std()) < 1.5 for t in (first.q, first.c_kv, first.dout))
