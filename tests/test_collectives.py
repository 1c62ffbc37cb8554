"""Rows arrive where they belong, in every dtype and any strides; what does not fit is refused unsent."""

from __future__ import annotations

import gc
import re
import weakref

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from laga_attn.collectives import Pending, all_gather_rows, exchange_rows
from laga_attn.grid import ContextParallel
from laga_attn.traffic import Record, traffic
from tests.compare import assert_bitwise

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def _rows(source, target, count, dtype, width=6):
    """Rows that say who sent them to whom, and differ from each other in every element."""
    numbers = torch.arange(count * width, dtype=torch.float64).view(count, width)
    return ((source * 8 + target) * 32 + numbers).to(dtype)


def _strided(x):
    """The same values behind other strides."""
    padded = torch.full((x.shape[1] + 1, 2 * x.shape[0]), -1.0, dtype=x.dtype)
    view = padded[1:, ::2].t()
    view.copy_(x)
    assert not view.is_contiguous() or x.numel() < 2
    return view


# --- all-gather


def gathers(ctx, count, dtype, strided):
    mine = _rows(ctx.rank, 0, count, dtype).view(count, 6)
    cp = ContextParallel(ctx.group)
    with traffic() as t:
        pending = all_gather_rows(_strided(mine) if strided else mine, cp, kind="latent", phase="backward")
        out = pending.wait()
    return out, out.is_contiguous(), t.records


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_all_gather_is_rank_major_and_counts_what_leaves_and_arrives(ranks, size, dtype, strided):
    expected = torch.cat([_rows(r, 0, 3, dtype) for r in range(size)])
    for rank, (out, contiguous, records) in enumerate(ranks(size).run(gathers, 3, dtype, strided)):
        assert_bitwise(out, expected)
        assert contiguous
        moved = tuple(3 * 6 * dtype.itemsize * (p != rank) for p in range(size))
        assert records == [Record("latent", "all_gather", "backward", moved, moved)] * (size > 1)


def gathers_nothing(ctx):
    cp = ContextParallel(ctx.group)
    return all_gather_rows(torch.empty(0, 3, 2), cp, kind="latent", phase="forward").wait().shape


def test_gathering_zero_rows_works(ranks):
    assert ranks(3).run(gathers_nothing) == [(0, 3, 2)] * 3


# --- exchange

# rows[source][target]; a Ulysses exchange among two pairs of four leaves zeros outside the pairs.
ROWS = {
    1: [[3]],
    2: [[1, 2], [3, 0]],
    3: [[0, 2, 1], [4, 1, 0], [0, 0, 0]],
    4: [[1, 2, 0, 0], [3, 1, 0, 0], [0, 0, 2, 5], [0, 0, 1, 0]],
}


def exchanges(ctx, dtype, strided):
    table = ROWS[ctx.size]
    send = [_rows(ctx.rank, p, table[ctx.rank][p], dtype) for p in range(ctx.size)]
    originals = [piece.clone() for piece in send]
    send = [_strided(piece) for piece in send] if strided else send
    recv_rows = [table[p][ctx.rank] for p in range(ctx.size)]
    cp = ContextParallel(ctx.group)
    with traffic() as t:
        out = exchange_rows(send, recv_rows, cp, kind="query", phase="forward").wait()
    received = out.clone()
    out.fill_(-1)  # would show in `send` if the result were an alias of it
    for piece, original in zip(send, originals, strict=True):
        assert_bitwise(piece, original)
    return received, out.is_contiguous(), t.records


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_exchange_delivers_each_piece_to_its_rank_and_counts_all_but_the_own(ranks, size, dtype, strided):
    table = ROWS[size]
    for rank, (out, contiguous, records) in enumerate(ranks(size).run(exchanges, dtype, strided)):
        assert_bitwise(out, torch.cat([_rows(p, rank, table[p][rank], dtype) for p in range(size)]))
        assert contiguous
        sent = tuple(table[rank][p] * (p != rank) * 6 * dtype.itemsize for p in range(size))
        received = tuple(table[p][rank] * (p != rank) * 6 * dtype.itemsize for p in range(size))
        assert records == [Record("query", "all_to_all", "forward", sent, received)] * (size > 1)


def starts_two_and_finishes_them_in_reverse(ctx):
    cp = ContextParallel(ctx.group)
    first = all_gather_rows(torch.full((1,), float(ctx.rank)), cp, kind="latent", phase="forward")
    send = [torch.full((1,), 10.0 * ctx.rank + p) for p in range(ctx.size)]
    second = exchange_rows(send, [1] * ctx.size, cp, kind="query", phase="forward")
    del send
    return second.wait().tolist(), first.wait().tolist()


def test_collectives_overlap_and_may_be_waited_for_in_any_order(ranks):
    for rank, (exchanged, gathered) in enumerate(ranks(3).run(starts_two_and_finishes_them_in_reverse)):
        assert exchanged == [rank, 10 + rank, 20 + rank]
        assert gathered == [0, 1, 2]


def starts_without_overlap(ctx):
    cp = ContextParallel(ctx.group, overlap=False)
    gathered = all_gather_rows(torch.full((1,), float(ctx.rank)), cp, kind="latent", phase="forward")
    exchanged = exchange_rows([torch.ones(1)] * ctx.size, [1] * ctx.size, cp, kind="query", phase="forward")
    done = [pending._work.is_completed() for pending in (gathered, exchanged)]
    return done, gathered.wait().tolist(), exchanged.wait().tolist()


def test_without_overlap_a_collective_is_over_when_it_returns(ranks):
    assert ranks(2).run(starts_without_overlap) == [([True, True], [0, 1], [1, 1])] * 2


# --- handles


class _Sent:
    """Stands for a buffer in flight."""


def test_the_sent_buffer_lives_until_the_wait_and_no_longer():
    sent = _Sent()
    alive = weakref.ref(sent)
    pending = Pending(torch.ones(1), None, sent)
    del sent
    gc.collect()
    assert alive() is not None
    pending.wait()
    gc.collect()
    assert alive() is None


def test_waiting_twice_is_an_error():
    pending = all_gather_rows(torch.ones(2), ContextParallel.none(), kind="latent", phase="forward")
    assert_bitwise(pending.wait(), torch.ones(2))
    with pytest.raises(RuntimeError, match="already waited for"):
        pending.wait()


# --- refusals


def misuses_all_gather(ctx, what):
    x = {
        "scalar": torch.ones(()),
        "grad": torch.ones(2, requires_grad=True),
        "device": torch.ones(2, device="meta"),
    }[what]
    all_gather_rows(x, ContextParallel(ctx.group), kind="latent", phase="forward")


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("scalar", "all-gather of latent: a tensor without dimensions has no rows"),
        ("grad", r"all-gather of latent: a tensor of shape \(2,\) needs a gradient"),
        ("device", "the tensor is on meta, which the group's backend 'gloo' cannot reach"),
    ],
)
def test_all_gather_refuses_what_it_cannot_move(ranks, what, text):
    ranks(2).run_raises(misuses_all_gather, what, match=text)


def misuses_exchange(ctx, what):
    send = [torch.ones(2, 3), torch.ones(2, 3)]
    recv_rows = [2, 2]
    if what == "pieces":
        send.append(torch.ones(2, 3))
    elif what == "counts":
        recv_rows.append(0)
    elif what == "shape":
        send[1] = torch.ones(2, 4)
    elif what == "dtype":
        send[1] = send[1].double()
    elif what == "device":
        send[1] = send[1].to("meta")
    elif what == "negative":
        recv_rows[1 - ctx.rank] = -1
    elif what == "own":
        recv_rows[ctx.rank] = 1
    exchange_rows(send, recv_rows, ContextParallel(ctx.group), kind="query", phase="forward")


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("pieces", "send has 3 entries for 2 ranks"),
        ("counts", "recv_rows has 3 entries for 2 ranks"),
        ("shape", r"equal trailing shapes, not \(3,\), \(4,\)"),
        ("dtype", "equal dtypes, not torch.float32, torch.float64"),
        ("device", "is on meta, which the group's backend 'gloo' cannot reach"),
        ("negative", r"recv_rows \[.*-1.*\] has a negative count"),
        ("own", "keeps 2 rows for itself in send, but expects 1 in recv_rows"),
    ],
)
def test_exchange_refuses_what_does_not_fit_before_anything_is_sent(ranks, what, text):
    for error in ranks(2).run_raises(misuses_exchange, what, match=text, same=False):
        assert error.startswith("exchange of query: ")


def test_one_process_checks_its_arguments_too():
    with pytest.raises(ValueError, match=re.escape("send has 0 entries for 1 ranks")):
        exchange_rows([], [1], ContextParallel.none(), kind="query", phase="forward")
    with pytest.raises(ValueError, match="keeps 2 rows for itself"):
        exchange_rows([torch.ones(2)], [1], ContextParallel.none(), kind="query", phase="forward")


# --- planning: no processes, no data


@pytest.fixture
def fake_cp():
    """Rank 5 of 64 that do not exist."""
    dist.init_process_group("fake", rank=5, world_size=64, store=FakeStore())
    yield ContextParallel(dist.group.WORLD, ulysses_degree=8)
    dist.destroy_process_group()


def test_64_fake_ranks_give_the_shapes_and_bytes_of_a_real_run(fake_cp):
    with FakeTensorMode(), traffic() as t:
        latent = torch.empty(2048, 1, 576, dtype=torch.bfloat16)
        gathered = all_gather_rows(latent, fake_cp, kind="latent", phase="forward").wait()
        send = [torch.empty(7 if p < 8 else 0, 16, 192) for p in range(64)]
        recv_rows = [p + 2 if p < 8 else 0 for p in range(64)]
        exchanged = exchange_rows(send, recv_rows, fake_cp, kind="query", phase="forward").wait()
    for out, shape, dtype in (
        (gathered, (64 * 2048, 1, 576), torch.bfloat16),
        (exchanged, (sum(range(2, 10)), 16, 192), torch.float32),
    ):
        assert isinstance(out, FakeTensor)
        assert (out.shape, out.dtype) == (shape, dtype)
        assert out.is_contiguous()
    latent_bytes, row_bytes = 2 * 2048 * 576 * 63, 4 * 16 * 192
    latent_record, query_record = t.records
    assert (latent_record.kind, latent_record.op, latent_record.phase) == ("latent", "all_gather", "forward")
    assert (latent_record.sent, latent_record.received) == (latent_bytes, latent_bytes)
    sent = tuple(7 * row_bytes if p < 8 and p != 5 else 0 for p in range(64))
    received = tuple((p + 2) * row_bytes if p < 8 and p != 5 else 0 for p in range(64))
    assert query_record == Record("query", "all_to_all", "forward", sent, received)


def test_fake_ranks_check_like_real_ones(fake_cp):
    send = [torch.empty(1, 2)] * 64
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(ValueError, match="has 63 entries for 64"):
        exchange_rows(send, [1] * 63, fake_cp, kind="query", phase="forward")


class _ListBackend:
    """Stands for a device backend: notes the rows that it is given, and delivers the source rank's number."""

    def __init__(self):
        self.calls = []

    def all_to_all(self, receive, pieces, group, async_op):
        assert async_op
        self.calls.append([piece.shape[0] for piece in pieces])
        for source, out in enumerate(receive):
            out.fill_(source)


def test_the_list_form_leaves_the_own_piece_at_home_and_fills_the_result_in_place(fake_cp, monkeypatch):
    backend = _ListBackend()
    monkeypatch.setattr(dist, "all_to_all", backend.all_to_all)
    send = [torch.full((p % 3, 2), 100.0 + p) for p in range(64)]
    out = exchange_rows(send, [2] * 64, fake_cp, kind="query", phase="forward").wait()
    assert backend.calls == [[p % 3 if p != 5 else 0 for p in range(64)]]
    expected = torch.arange(64.0).repeat_interleave(2)
    expected[10:12] = 105.0
    assert_bitwise(out, expected[:, None].expand(-1, 2))
