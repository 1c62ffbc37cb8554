"""The ledger of whole attention calls agrees with the kernel's own byte counter of a private loopback interface."""

from __future__ import annotations

import pytest
import torch

import laga_attn as laga
from laga_attn.layout import SequenceLayout

HEADS, NOPE, ROPE, V, RANK, TOKENS = 8, 32, 16, 32, 512, 4096


def attention(ctx, scheme, degree):
    """One forward and backward, tens of MB: enough that headers are below a percent."""
    layout = SequenceLayout.zigzag(TOKENS, ctx.size)
    cp = laga.ContextParallel(ctx.group, degree)
    s = layout.local_len
    shapes = ((1, s, HEADS, NOPE + ROPE), (1, s, RANK), (1, s, ROPE), (HEADS * (NOPE + V), RANK))
    leaves = [torch.randn(*shape, requires_grad=True) for shape in shapes]
    with laga.traffic() as t:
        out = laga.latent_attention(*leaves, layout=layout, cp=cp, scheme=scheme, qk_nope_head_dim=NOPE, v_head_dim=V)
        out.backward(torch.ones_like(out))
    return t.sent(), t.received()


@pytest.mark.parametrize(("size", "degree"), [(2, 2), (3, 1)])
@pytest.mark.parametrize("scheme", ["laga", "explicit"])
def test_the_ledger_is_what_crosses_the_wire(private_network, scheme, size, degree):
    wire = private_network.run(attention, size, scheme, degree)
    sent = sum(result[0] for result in wire.results)
    assert sent == sum(result[1] for result in wire.results)
    assert sent > 10_000_000
    assert sent <= wire.bytes <= 1.01 * sent
