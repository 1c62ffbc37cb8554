"""How rows are addressed, beyond what the schemes' tests see of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from laga_attn.movement import row_numbers

ROWS = np.array([4, 0, 2])


def test_row_numbers_reach_a_gpu_from_pinned_memory_while_the_host_goes_on(monkeypatch):
    calls: list[Any] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: calls.append("pinned") or self)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *args, **kwargs: calls.append((args, kwargs)) or self)
    gpu = torch.device("cuda", 1)
    assert row_numbers(ROWS, SimpleNamespace(is_cuda=True, device=gpu)).tolist() == [4, 0, 2]
    assert calls == ["pinned", ((gpu,), {"non_blocking": True})]


def test_row_numbers_on_a_cpu_and_in_a_trace():
    assert row_numbers(ROWS, torch.empty(3)).tolist() == [4, 0, 2]
    with FakeTensorMode() as mode:
        traced = row_numbers(ROWS, torch.empty(3, device="cuda"))
        assert (traced.fake_mode, traced.device.type, traced.shape) == (mode, "cuda", (3,))
