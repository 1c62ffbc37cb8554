"""`benchmarks/kernel_check.py`, on the kernels of a CPU: what a GPU would be asked."""

from __future__ import annotations

import pytest
import torch
from benchmarks import kernel_check
from benchmarks.kernel_check import DIMS, RIGHT, check_kernels, masks

from laga_attn.kernels import Kernel, kernels_here

CPU = torch.device("cpu")


def test_every_kernel_is_checked_on_every_mask_and_right():
    checks = list(check_kernels(CPU, small=True))
    for check in checks:
        assert check.right, check
        assert check.error > 0
        assert check.lse_gradient
    for dtype in RIGHT:
        for name in kernels_here(CPU, getattr(torch, dtype)):
            mine = {(c.dims, c.mask) for c in checks if (c.kernel, c.dtype) == (name, dtype)}
            everything = {(dims, mask) for dims in DIMS for mask in masks(8)}
            refused = {(d, m) for d, m in everything if name == "sdpa" and (d[0] != d[1] or m == "window")}
            assert mine == everything - refused


@pytest.mark.parametrize("wrong", ["fails", "has a NaN", "is off"])
def test_a_kernel_that_is_wrong_is_found_and_hides_no_other(monkeypatch, wrong):
    right = Kernel.backward

    def backward(self, *args):
        if self.name != "blockwise":
            return right(self, *args)
        if wrong == "fails":
            raise RuntimeError("no kernel image is available")
        dq, dk, dv = right(self, *args)
        dk[0, 0, 0, 0] = torch.nan if wrong == "has a NaN" else dk[0, 0, 0, 0] + 0.2 * dk.abs().max()
        return dq, dk, dv

    monkeypatch.setattr(Kernel, "backward", backward)
    monkeypatch.setattr(kernel_check, "DIMS", ((16, 16),))
    monkeypatch.setattr(kernel_check, "RIGHT", {"float32": 1e-4})
    checks = list(check_kernels(CPU, small=True))
    assert {c.kernel for c in checks if not c.right} == {"blockwise"}
    assert {c.kernel for c in checks if c.right} >= {"reference", "sdpa"}
    assert {c.failure for c in checks if not c.right} == {"no kernel image is available" if wrong == "fails" else ""}
