"""What a step computes: decode grows with the cache and falls with the ranks; prefill rebuilds its context once."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.flop_counter import FlopCounterMode

import laga_attn as laga
from laga_attn.inference import LatentCache, attend

HEADS = 16
ABSORBED, REBUILT = 2**40, 1


def flops(size: int, context: int, new: int, rebuild_from: int) -> int:
    """FLOPs of one layer on rank 0, with DeepSeek-V3's head sizes, by the real code on fake tensors."""
    if size > 1:
        dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        cp = laga.ContextParallel.none() if size == 1 else laga.ContextParallel(dist.group.WORLD)
        with FakeTensorMode():
            cache = LatentCache(1, 512, 64, cp=cp)
            sequence = cache.add()
            cache.append(sequence, torch.empty(1, context, 576, dtype=torch.bfloat16))
            step = cache.plan({sequence: new}, rebuild_from=rebuild_from)
            shapes = ((HEADS, 192), (512,), (64,))
            tokens = (torch.empty(1, step.local_len, *shape, dtype=torch.bfloat16) for shape in shapes)
            weight = torch.empty(HEADS * 256, 512, dtype=torch.bfloat16)
            with FlopCounterMode(display=False) as counter:
                attend(*tokens, weight, cache=cache, step=step, layer=0, qk_nope_head_dim=128, v_head_dim=128)
            return counter.get_total_flops()
    finally:
        if size > 1:
            dist.destroy_process_group()


@pytest.mark.parametrize("size", [1, 2, 8])
@pytest.mark.parametrize("new", [1, 4])
def test_decode_reads_its_part_of_the_cache_and_rebuilds_nothing(size, new):
    context = 64 * 128 - 1  # with the first new token, rank 0 has a P-th
    attention = 2 * new * HEADS * (8192 // size) * (576 + 512)
    # W_UK of all heads before, W_UV of this rank's share after; the other new tokens see each other.
    absorbing = 2 * new * 512 * (HEADS * 128 + HEADS * 128 // size)
    # The further new tokens fill rank 0's next page, and each sees those up to itself.
    among_new = 2 * HEADS * (576 + 512) * sum(range(new))
    assert flops(size, context, new, ABSORBED) == attention + absorbing + among_new


def test_decode_costs_a_fraction_of_rebuilding():
    absorbed, rebuilt = flops(1, 4096, 1, ABSORBED), flops(1, 4096, 1, REBUILT)
    assert rebuilt > 100 * absorbed
    assert flops(1, 8192, 1, ABSORBED) - absorbed < 0.01 * rebuilt


def test_many_query_tokens_cost_less_rebuilt():
    assert flops(1, 4096, 512, REBUILT) < 0.7 * flops(1, 4096, 512, ABSORBED)
    assert flops(1, 4096, 32, REBUILT) > 1.5 * flops(1, 4096, 32, ABSORBED)


@pytest.mark.parametrize("size", [1, 4])
def test_a_chunk_rebuilds_its_context_once(size):
    context, new = 4096, 512
    measured = flops(size, context, new, REBUILT) - flops(size, 1, new, REBUILT)
    rebuild = 2 * 512 * 256 * HEADS * (context - 1)
    attention = 2 * (new // size) * HEADS * (context - 1) * 320
    assert measured == rebuild + attention
