"""The ledger counts every byte that crosses this rank's port, and the kernel's own counter agrees."""

from __future__ import annotations

import threading

import pytest
import torch

from laga_attn.agreement import agree
from laga_attn.collectives import all_gather_rows, exchange_rows
from laga_attn.grid import ContextParallel
from laga_attn.traffic import Record, Traffic, record, traffic

LATENT = Record("latent", "all_gather", "forward", (0, 30), (0, 30))
LATENT_GRAD = Record("latent_grad", "all_to_all", "backward", (0, 31), (0, 29))
QUERY = Record("query", "all_to_all", "forward", (0, 5), (0, 7))
CONTROL = Record("agreement", "all_gather", "forward", (0, 16), (0, 16))


def test_sums_select_by_kind_and_phase_and_leave_control_messages_out():
    t = Traffic([LATENT, LATENT_GRAD, QUERY, CONTROL])
    assert (t.sent(), t.received()) == (66, 66)
    assert (t.sent("query"), t.received("query")) == (5, 7)
    assert (t.sent(phase="backward"), t.received(phase="forward")) == (31, 37)
    assert t.sent("latent", "backward") == 0
    assert t.sent("agreement") == 16
    assert t.select("agreement") == [CONTROL]


def test_bytes_across_are_those_that_leave_the_ulysses_group():
    t = Traffic([Record("latent", "all_to_all", "forward", (1, 2, 0, 8), (16, 32, 0, 64)), CONTROL])
    assert (t.sent(), t.received()) == (11, 112)
    assert [t.sent_across(degree, 2) for degree in (1, 2, 4)] == [11, 3, 0]


def test_nested_blocks_record_everything_issued_while_they_are_open():
    with traffic() as outer:
        record(LATENT)
        with traffic() as inner:
            record(QUERY)
        record(LATENT_GRAD)
    record(CONTROL)
    assert outer.records == [LATENT, QUERY, LATENT_GRAD]
    assert inner.records == [QUERY]


def test_blocks_close_in_any_order_and_after_errors():
    first, second = traffic(), traffic()
    a, b = first.__enter__(), second.__enter__()
    record(LATENT)
    first.__exit__(None, None, None)
    record(QUERY)
    second.__exit__(None, None, None)
    assert (a.records, b.records) == ([LATENT], [LATENT, QUERY])


def test_a_block_that_ends_with_an_error_is_closed():
    def fails():
        with traffic() as t:
            ledgers.append(t)
            raise KeyError

    ledgers = []
    with pytest.raises(KeyError):
        fails()
    record(LATENT)
    assert [t.records for t in ledgers] == [[]]


def test_other_threads_are_recorded_without_loss():
    def work():
        for _ in range(500):
            record(LATENT)

    threads = [threading.Thread(target=work) for _ in range(4)]
    with traffic() as t:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert t.records == [LATENT] * 2000


def test_the_table_has_a_line_for_each_kind_and_phase_and_a_total():
    mib = 2**20
    t = Traffic(
        [
            Record("latent", "all_gather", "forward", (0, 3 * mib), (0, 3 * mib)),
            Record("latent", "all_gather", "backward", (0, mib), (0, mib)),
            Record("latent", "all_gather", "forward", (0, mib // 2), (0, mib)),
            CONTROL,
        ]
    )
    lines = t.table().splitlines()
    assert [line.split() for line in lines] == [
        ["kind", "phase", "calls", "sent", "MiB", "received", "MiB"],
        ["latent", "forward", "2", "3.500", "4.000"],
        ["latent", "backward", "1", "1.000", "1.000"],
        ["total", "3", "4.500", "5.000"],
    ]
    assert len({len(line) for line in lines}) == 1
    assert Traffic().table().splitlines()[-1].split() == ["total", "0", "0.000", "0.000"]


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(fn_ctx, x, cp):
        fn_ctx.cp = cp
        return all_gather_rows(x, cp, kind="latent", phase="forward").wait()

    @staticmethod
    def backward(fn_ctx, grad):
        cp = fn_ctx.cp
        pieces = list(grad.split(grad.shape[0] // cp.size))
        rows = [piece.shape[0] for piece in pieces]
        received = exchange_rows(pieces, rows, cp, kind="latent_grad", phase="backward").wait()
        return received.view(cp.size, -1, 2).sum(0), None


def runs_a_backward_pass(ctx):
    cp = ContextParallel(ctx.group)
    x = torch.ones(4, 2, requires_grad=True)
    with traffic() as t:
        agree(cp, {"rows": 4})
        thread = threading.Thread(target=lambda: _Sum.apply(x, cp).sum().backward())
        thread.start()
        thread.join()
    return t, x.grad


def test_collectives_of_a_backward_pass_in_another_thread_are_recorded(ranks):
    for t, grad in ranks(3).run(runs_a_backward_pass):
        assert [r.kind for r in t.records] == ["agreement", "latent", "latent_grad"]
        assert t.sent("latent", "forward") == t.sent("latent_grad", "backward") == 2 * 4 * 2 * 4
        assert t.sent() == 128
        assert torch.equal(grad, torch.full((4, 2), 3.0))


# --- against the counter of a network device


def gathers_megabytes(ctx, rows, dtype):
    with traffic() as t:
        x = torch.ones(rows, 1024, dtype=dtype)
        all_gather_rows(x, ContextParallel(ctx.group), kind="latent", phase="forward").wait()
    return t


def exchanges_megabytes(ctx, rows):
    """Unequal pieces, some empty, and one for this rank itself that must not be seen on the wire."""
    send = [torch.ones(rows * (1 + p) if (ctx.rank + p) % 3 else 0, 1024) for p in range(ctx.size)]
    recv_rows = [rows * (1 + ctx.rank) if (ctx.rank + p) % 3 else 0 for p in range(ctx.size)]
    with traffic() as t:
        exchange_rows(send, recv_rows, ContextParallel(ctx.group), kind="query", phase="backward").wait()
    return t


@pytest.mark.parametrize(
    ("size", "fn", "args"),
    [
        (2, gathers_megabytes, (4096, torch.bfloat16)),
        (3, gathers_megabytes, (2048, torch.float32)),
        (3, exchanges_megabytes, (1024,)),
    ],
)
def test_the_ledgers_of_all_ranks_add_up_to_what_the_loopback_device_counts(private_network, size, fn, args):
    wire = private_network.run(fn, size, *args)
    sent, received = (sum(getattr(t, side)() for t in wire.results) for side in ("sent", "received"))
    assert sent == received
    assert sent > 10 * 2**20
    assert sent <= wire.bytes < 1.01 * sent


def stays_silent(ctx):
    return ctx.rank


def test_nothing_but_the_ranks_messages_is_on_the_private_network(private_network):
    wire = private_network.run(stays_silent, 3)
    assert wire.results == [0, 1, 2]
    assert wire.bytes < 2000
