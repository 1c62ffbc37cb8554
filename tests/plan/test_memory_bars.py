"""What LAGA keeps and needs beside explicit, at DeepSeek-V3 dims."""

from __future__ import annotations

import pytest
import torch

import laga_attn as laga
from laga_attn.bench.memory import saved_tensors
from laga_attn.plan.subjects import trace_layer
from laga_attn.plan.workload import Candidate, Workload

CFG = laga.MLAConfig.preset("deepseek-v3")


def saved_bytes(ctx, scheme):
    """Of one attention call on real ranks, the weight not counted."""
    heads, tokens = CFG.num_attention_heads, 64
    layout, cp = laga.SequenceLayout.zigzag(tokens, ctx.size), laga.ContextParallel(ctx.group, ctx.size)
    s, rows = layout.local_len, heads * (CFG.qk_nope_head_dim + CFG.v_head_dim)
    shapes = ((1, s, heads, CFG.qk_head_dim), (1, s, CFG.kv_lora_rank), (1, s, CFG.qk_rope_head_dim))
    leaves = [torch.randn(*shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    weight = torch.randn(rows, CFG.kv_lora_rank, dtype=torch.bfloat16, requires_grad=True)
    with saved_tensors([weight]) as saved:
        out = laga.latent_attention(
            *leaves, weight, layout=layout, cp=cp, scheme=scheme, qk_nope_head_dim=CFG.qk_nope_head_dim,
            v_head_dim=CFG.v_head_dim,
        )  # fmt: skip
        kept = saved.nbytes
    del out
    return kept


@pytest.mark.parametrize("size", [2, 4])
def test_laga_saves_half_of_what_explicit_saves_at_128_heads(ranks, size):
    for kept, explicit in zip(
        ranks(size).run(saved_bytes, "laga"), ranks(size).run(saved_bytes, "explicit"), strict=True
    ):
        assert 0.4 <= kept / explicit <= 0.52


def _peak(scheme, save, tokens, size, degree):
    workload = Workload(cfg=CFG, seq_len=tokens, cp=size)
    return trace_layer(workload, Candidate(scheme, degree, save), 0).peak_bytes


@pytest.mark.parametrize(("tokens", "size"), [(2**15, 2), (2**15, 8), (2**17, 16)])
def test_the_peak_at_full_degree_is_below_three_quarters_of_explicits(tokens, size):
    ratio = _peak("laga", "latent", tokens, size, size) / _peak("explicit", "kv", tokens, size, size)
    assert ratio <= 0.75, f"{ratio:.3f}"


@pytest.mark.parametrize(("size", "degree"), [(8, 1), (8, 4), (32, 8), (32, 32)])
def test_with_four_heads_per_rank_or_more_the_peak_is_never_above_explicits(size, degree):
    ratio = _peak("laga", "latent", 2**16, size, degree) / _peak("explicit", "kv", 2**16, size, degree)
    assert ratio <= 1.0, f"{ratio:.3f}"
