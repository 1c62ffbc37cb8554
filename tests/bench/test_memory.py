from __future__ import annotations

import torch

from laga_attn.bench.memory import TensorMemory, saved_tensors
from laga_attn.kernels import select
from laga_attn.layout import Span

MIB = 2**20
QUARTER = MIB // 4  # fp32 elements in one MiB


def test_saved_bytes_count_each_storage_once_and_leave_out_what_exists_anyway():
    weight = torch.randn(QUARTER, requires_grad=True)
    inputs = torch.randn(QUARTER)
    with saved_tensors([weight]) as saved:
        product = weight * inputs  # saves both
        squared = product.view(2, -1) * product.view(2, -1)  # saves one storage through two views
        result = squared.exp().sum()  # saves the result of exp
    assert saved.nbytes == 3 * MIB
    result.backward()
    assert weight.grad is not None


def test_nothing_is_saved_without_gradients():
    weight = torch.randn(QUARTER, requires_grad=True)
    with saved_tensors() as saved, torch.no_grad():
        (weight * 2).exp()
    assert saved.nbytes == 0


def test_the_peak_is_what_existed_at_once_and_freed_memory_leaves():
    before = torch.randn(QUARTER)
    with TensorMemory() as memory:
        one = before + 1
        two = one * 2  # one, two
        del one
        three = two[: QUARTER // 2].clone()  # two, half of three
        view = three.view(2, -1)
        assert before.view(2, -1).shape[0] == 2  # a view of what existed before is nothing new
        del two, three
        assert memory.live == MIB // 2
        del view
        assert memory.live == 0
    assert memory.peak == 2 * MIB


def test_backward_and_its_temporaries_count():
    weight = torch.randn(QUARTER, requires_grad=True)
    with TensorMemory() as memory:
        (weight * 2).exp().sum().backward()
    assert memory.live == MIB  # the gradient
    assert 2 * MIB <= memory.peak <= 2 * MIB + 64


def test_kernels_are_looked_into():
    """The reference kernel holds score matrices that it returns nothing of."""
    rows, dim = 512, 4
    q, k, v = (torch.randn(1, rows, 1, dim) for _ in range(3))
    kernel = select("reference", device="cpu", dtype=torch.float32, qk_head_dim=dim, v_head_dim=dim)
    spans = [Span(0, rows, 0, rows, causal=True)]
    expected = kernel.forward(q, k, v, spans, 1.0)
    with TensorMemory() as memory:
        out, lse = kernel.forward(q, k, v, spans, 1.0)
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])
    assert memory.peak >= 4 * rows * rows
    assert memory.live == 4 * (out.numel() + lse.numel())
