"""A trace on tensors without data is the trace of a real run, byte by byte."""

from __future__ import annotations

import gc

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import laga_attn as laga
from laga_attn.plan.trace import Trace
from laga_attn.plan.world import fake_ranks
from tests.oracle import Case
from tests.plan.tracing import SMALL, Call, trace_call
from tests.ranks_attention import Run, attend

SCHEMES = ("laga", "explicit", "absorbed")
ZIGZAG = laga.SequenceLayout.zigzag(256, 4)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_without_data_and_with_data_every_byte_comes_and_goes_alike(scheme, degree):
    call = Call(ZIGZAG, scheme, degree, rank=2, batch=2)
    fake, real = trace_call(call), trace_call(call, real=True)
    assert fake.memory.events == real.memory.events
    assert [block.shape for block in fake.memory.blocks] == [block.shape for block in real.memory.blocks]
    assert fake.memory.peak().by_category == real.memory.peak().by_category
    assert fake.saved_bytes == real.saved_bytes > 0
    assert fake.flops == real.flops
    assert fake.transfers == real.transfers
    assert fake.hbm_bytes == real.hbm_bytes


@pytest.mark.parametrize("scheme", SCHEMES)
def test_looking_into_kernels_adds_their_own_memory_and_changes_nothing_else(scheme):
    call = Call(ZIGZAG, scheme, 2)
    outside, inside = trace_call(call), trace_call(call, look_inside=True)
    assert inside.memory.peak().nbytes > outside.memory.peak().nbytes
    assert inside.flops == outside.flops
    assert inside.calls == outside.calls
    assert inside.saved_bytes == outside.saved_bytes
    assert inside.transfers == outside.transfers


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_what_a_trace_sees_is_what_the_ledger_records(scheme, degree):
    with laga.traffic() as ledger:
        trace = trace_call(Call(ZIGZAG, scheme, degree, rank=3))
    assert trace.transfers
    assert [(t.kind, t.op, t.phase, t.sent, t.received) for t in trace.transfers] == [
        (r.kind, r.op, r.phase, r.sent_to, r.received_from) for r in ledger.records
    ]


def _ledger(ctx, case, run):
    with laga.traffic() as ledger:
        attend(ctx, case, run)
    return [record for record in ledger.records if record.kind != "agreement"]


def _predicted(case: Case, layout: laga.SequenceLayout, scheme: str, rank: int, degree: int):
    with fake_ranks(layout.cp_size, rank, degree) as cp, laga.traffic() as ledger, FakeTensorMode():
        shapes = ((case.heads, case.nope + case.rope), (case.rank,), (case.rope,))
        leaves = [torch.empty(1, layout.local_len, *shape, requires_grad=True) for shape in shapes]
        weight = torch.empty(case.heads * (case.nope + case.v), case.rank, requires_grad=True)
        out, lse = laga.latent_attention(
            *leaves, weight, layout=layout, cp=cp, scheme=scheme, qk_nope_head_dim=case.nope, v_head_dim=case.v,
            return_lse=True, kernel="blockwise",
        )  # fmt: skip
        torch.autograd.backward((out, lse), (torch.empty_like(out), torch.empty_like(lse)))
    return ledger.records


@pytest.mark.parametrize(("size", "degree"), [(2, 1), (3, 3), (4, 1), (4, 2), (4, 4)])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_trace_predicts_the_ledger_of_real_ranks_record_by_record(ranks, scheme, size, degree):
    case = Case(lengths=(45, 30), heads=12, dtype=torch.float32)
    layout = laga.SequenceLayout.packed(case.cu_seqlens, size)
    recorded = ranks(size).run(_ledger, case, Run(scheme=scheme, ulysses_degree=degree))
    for rank, records in enumerate(recorded):
        assert _predicted(case, layout, scheme, rank, degree) == records


@pytest.mark.parametrize(
    ("scheme", "save", "extra"),
    [
        ("laga", "latent", 0),
        ("laga", "gathered", "latents"),
        ("laga", "kv", "latents, keys and values"),
        ("explicit", "kv", "keys and values"),
        ("explicit", "latent", 0),
        ("absorbed", "latent", "outputs in latent space"),
    ],
)
def test_what_is_kept_is_what_the_save_policy_says(scheme, save, extra):
    """Per token of the rank: query, output, LSE and the local latent; more by policy."""
    tokens, keys, heads = 64, 256, SMALL.num_heads
    sizes = {
        0: 0,
        "latents": 2 * keys * SMALL.latent_dim,
        "keys and values": 2 * keys * heads // 4 * SMALL.kv_head_dim,
        "outputs in latent space": 2 * tokens * heads * SMALL.kv_lora_rank,
    }
    sizes["latents, keys and values"] = sizes["latents"] + sizes["keys and values"]
    always = tokens * (2 * heads * (SMALL.qk_head_dim + SMALL.v_head_dim) + 4 * heads + 2 * SMALL.latent_dim)
    assert trace_call(Call(ZIGZAG, scheme, 4, save=save)).saved_bytes == always + sizes[extra]


def test_a_reference_cycle_keeps_its_tensors_in_every_run_alike():
    class Knot:
        def __init__(self) -> None:
            self.tensor, self.me = torch.zeros(1000), self

    with Trace() as trace:
        for _ in range(50):
            Knot()
        assert not gc.isenabled()
        assert trace.memory.live_bytes() == 50 * 4000
        gc.collect()
        assert trace.memory.live_bytes() == 0
    assert gc.isenabled()


def test_tensors_that_existed_before_do_not_count_unless_they_are_watched():
    before, watched = torch.zeros(1000), torch.zeros(10)
    with Trace() as trace:
        trace.watch([watched, None], "input")
        before.add_(1.0)
        before.view(10, 100).mul_(2.0)
        torch.mm(before.view(10, 100), before.view(100, 10), out=torch.empty(10, 10))
    assert trace.memory.peak().by_category == {"input": 40, "forward temporary": 400}


def test_a_pass_without_gradients_keeps_nothing():
    with Trace() as trace, torch.no_grad():
        out = torch.nn.Linear(4, 4)(torch.zeros(2, 4)).relu()
        trace.start_backward(out)
    assert trace.saved_bytes == 0


def test_what_a_saved_tensor_hook_of_the_user_packs_is_left_to_it():
    x = torch.ones(1000, requires_grad=True)
    with Trace() as trace:
        trace.watch([x], "input")
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.numel(), lambda n: torch.ones(n)):
            out = (x * 2).exp()
        trace.start_backward(out)
        out.sum().backward()
    assert trace.saved_bytes == 0
