from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch._subclasses.fake_tensor import FakeTensorMode

from laga_attn.plan.trace import Trace
from laga_attn.plan.world import fake_ranks

RANKS, ME = 4, 1
SHARD = 6 * 4  # bytes of six fp32 elements


def _traced(action):
    with fake_ranks(RANKS, ME), FakeTensorMode(), Trace() as trace:
        result = action()
    return trace, result


def _each(size: int) -> tuple[int, ...]:
    return tuple(0 if rank == ME else size for rank in range(RANKS))


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


@pytest.mark.parametrize(
    ("action", "op", "per_peer"),
    [
        (lambda: dist.all_gather_into_tensor(torch.empty(24), torch.empty(6)), "all_gather", SHARD),
        (lambda: dist.all_gather([torch.empty(6) for _ in range(RANKS)], torch.empty(6)), "all_gather", SHARD),
        (lambda: dist.reduce_scatter_tensor(torch.empty(6), torch.empty(24)), "reduce_scatter", SHARD),
        (lambda: dist.all_reduce(torch.empty(24)), "all_reduce", 2 * SHARD),
        (lambda: dist.all_to_all_single(torch.empty(24), torch.empty(24)), "all_to_all", SHARD),
        (lambda: functional.all_gather_tensor(torch.empty(6), 0, _world()), "all_gather", SHARD),
        (lambda: functional.reduce_scatter_tensor(torch.empty(24), "sum", 0, _world()), "reduce_scatter", SHARD),
        (lambda: functional.all_reduce(torch.empty(24), "sum", _world()), "all_reduce", 2 * SHARD),
    ],
)
@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_collectives_of_any_library_are_seen(action, op, per_peer):
    (transfer,) = _traced(action)[0].transfers
    assert (transfer.op, transfer.kind, transfer.rank, transfer.group) == (op, "", ME, tuple(range(RANKS)))
    assert transfer.sent == transfer.received == _each(per_peer)
    assert transfer.sent_bytes() == per_peer * (RANKS - 1)
    assert transfer.received_bytes(lambda rank: rank < 1) == per_peer


@pytest.mark.parametrize("form", ["list", "packed", "functional"])
def test_pieces_of_an_all_to_all_may_differ(form):
    sent, received = [3, 1, 0, 2], [2, 1, 4, 0]

    def exchange() -> None:
        if form == "list":
            dist.all_to_all([torch.empty(n, 2) for n in received], [torch.empty(n, 2) for n in sent])
        elif form == "packed":
            dist.all_to_all_single(torch.empty(sum(received), 2), torch.empty(sum(sent), 2), received, sent)
        else:
            functional.all_to_all_single(torch.empty(sum(sent), 2), received, sent, _world())

    (transfer,) = _traced(exchange)[0].transfers
    assert transfer.sent == (24, 0, 0, 16)
    assert transfer.received == (16, 0, 32, 0)


def test_waiting_for_a_functional_collective_makes_no_second_tensor():
    def reduce() -> torch.Tensor:
        return functional.wait_tensor(functional.all_reduce(torch.empty(24), "sum", _world()))

    trace, result = _traced(reduce)
    assert trace.memory.peak().nbytes == 2 * result.nbytes  # what goes in and what comes out
    assert trace.memory.live_bytes() == result.nbytes


def test_a_barrier_moves_nothing_and_an_unknown_collective_is_an_error():
    assert not _traced(dist.barrier)[0].transfers
    with pytest.raises(NotImplementedError, match=r"does not know what c10d\.gather_"):
        _traced(lambda: dist.gather(torch.empty(6), None, dst=0))


@pytest.mark.parametrize(("size", "rank"), [(4, 4), (4, -1), (1, 1)])
def test_a_rank_outside_the_group_is_refused(size, rank):
    with pytest.raises(ValueError, match=f"rank {rank} is not one of {size} ranks"), fake_ranks(size, rank):
        pass


def test_fake_ranks_do_not_nest_and_leave_nothing_behind():
    threads = torch.get_num_threads()
    with fake_ranks(8, 3, 4) as cp:
        assert torch.get_num_threads() == 1  # head groups follow them
        assert (cp.size, cp.rank, cp.ulysses_degree, cp.backend) == (8, 3, 4, "fake")
        with pytest.raises(ValueError, match="joined a process group"), fake_ranks(2, 0):
            pass
    assert not dist.is_initialized()
    assert torch.get_num_threads() == threads
    with fake_ranks(1, 0) as cp:
        assert cp.group is None
