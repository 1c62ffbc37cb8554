"""What a collective moves through the port of one rank, seen at the dispatcher: any library's, not only ours.

Sizes are per peer, so that a cluster's nodes can be laid over them afterwards. An all-gather and a reduce-scatter move
one shard per peer, an all-reduce is the two one after the other, and an all-to-all moves what its pieces say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group

from laga_attn.traffic import Phase

__all__ = ["Transfer", "is_collective", "is_wait", "transfer_of"]

_NAMESPACES: Final = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
_MOVES_NOTHING: Final = ("wait_tensor", "barrier", "monitored_barrier_", "check_for_nan")


@dataclass(frozen=True, slots=True)
class Transfer:
    """One collective of one rank.

    Attributes:
        op: `"all_gather"`, `"all_to_all"`, `"reduce_scatter"`, `"all_reduce"` or `"broadcast"`.
        kind: what travels by the name in :func:`laga_attn.traffic`'s ledger; empty for collectives of others.
        phase: forward or backward.
        group: global ranks of the process group; `rank` is this rank's place among them.
        sent, received: bytes to and from each rank of the group, 0 for the rank itself.
    """

    op: str
    kind: str
    phase: Phase
    group: tuple[int, ...]
    rank: int
    sent: tuple[int, ...]
    received: tuple[int, ...]

    def sent_bytes(self, to: Callable[[int], bool] = lambda rank: True) -> int:
        """Bytes sent to the global ranks that `to` accepts: all by default."""
        return sum(size for peer, size in zip(self.group, self.sent, strict=True) if to(peer))

    def received_bytes(self, source: Callable[[int], bool] = lambda rank: True) -> int:
        """Bytes received from the global ranks that `source` accepts: all by default."""
        return sum(size for peer, size in zip(self.group, self.received, strict=True) if source(peer))


def is_collective(func: Any) -> bool:
    """Whether an operator belongs to the collectives of torch.distributed."""
    return func.namespace in _NAMESPACES


def is_wait(func: Any) -> bool:
    """Whether an operator only waits for the tensor of a functional collective."""
    return is_collective(func) and func.overloadpacket.__name__ == "wait_tensor"


def transfer_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], phase: Phase, kind: str) -> Transfer | None:
    """What one collective moves; None if it moves nothing.

    Raises:
        NotImplementedError: a collective that is not modelled; better no answer than a wrong sum.
    """
    name = func.overloadpacket.__name__
    if name in _MOVES_NOTHING:
        return None
    if name not in _SIZES:
        raise NotImplementedError(f"the planner does not know what {func} moves; known: {', '.join(_SIZES)}")
    op, sizes = _SIZES[name]
    group = _group_of(args, kwargs)
    ranks = dist.get_process_group_ranks(group)
    me = dist.get_rank(group)
    sent, received = sizes(args, len(ranks))
    return Transfer(op, kind, phase, tuple(ranks), me, _without(sent, me), _without(received, me))


def _group_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dist.ProcessGroup:
    """The process group among the arguments: an object, or the name that functional collectives pass."""
    for value in (*args, *kwargs.values()):
        if type(value).__name__ == "ScriptObject" and "ProcessGroup" in value._type().name():
            return dist.ProcessGroup.unbox(value)
    names: list[Any] = [value for value in (*args, *kwargs.values()) if isinstance(value, str)]
    return _resolve_process_group(names[-1])  # the name is the last string


def _without(sizes: Sequence[int], me: int) -> tuple[int, ...]:
    return tuple(0 if rank == me else size for rank, size in enumerate(sizes))


Sizes = tuple[Sequence[int], Sequence[int]]


def _gathered(shard: Tensor, ranks: int) -> Sizes:
    return [shard.nbytes] * ranks, [shard.nbytes] * ranks


def _scattered(whole: int, ranks: int) -> Sizes:
    return [-(-whole // ranks)] * ranks, [-(-whole // ranks)] * ranks


def _reduced(tensors: Sequence[Tensor], ranks: int) -> Sizes:
    shard = -(-sum(tensor.nbytes for tensor in tensors) // ranks)
    return [2 * shard] * ranks, [2 * shard] * ranks


def _pieces(received: Sequence[Tensor], sent: Sequence[Tensor]) -> Sizes:
    return [piece.nbytes for piece in sent], [piece.nbytes for piece in received]


def _packed(received: Tensor, sent: Tensor, out_rows: Sequence[int], in_rows: Sequence[int], ranks: int) -> Sizes:
    def sizes(buffer: Tensor, rows: Sequence[int]) -> list[int]:
        if not rows:
            return [buffer.nbytes // ranks] * ranks
        row_bytes = buffer.element_size() * buffer.shape[1:].numel()
        return [count * row_bytes for count in rows]

    return sizes(sent, in_rows), sizes(received, out_rows)


def _functional_exchange(args: Sequence[Any], ranks: int) -> Sizes:
    sent, out_rows, in_rows = args[:3]
    row_bytes = sent.element_size() * sent.shape[1:].numel()
    return [count * row_bytes for count in in_rows], [count * row_bytes for count in out_rows]


def _list_of(tensors: Any) -> Sequence[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else tensors


# For each operator: the collective that it is, and bytes to and from every rank out of its arguments.
_SIZES: Final[Mapping[str, tuple[str, Callable[[Sequence[Any], int], Sizes]]]] = {
    "_allgather_base_": ("all_gather", lambda args, ranks: _gathered(args[1], ranks)),
    "allgather_": ("all_gather", lambda args, ranks: _gathered(args[1][0], ranks)),
    "alltoall_": ("all_to_all", lambda args, ranks: _pieces(args[0], args[1])),
    "alltoall_base_": ("all_to_all", lambda args, ranks: _packed(args[0], args[1], args[3], args[4], ranks)),
    "_reduce_scatter_base_": ("reduce_scatter", lambda args, ranks: _scattered(args[1].nbytes, ranks)),
    "allreduce_": ("all_reduce", lambda args, ranks: _reduced(args[0], ranks)),
    "all_reduce": ("all_reduce", lambda args, ranks: _reduced(_list_of(args[0]), ranks)),
    "all_reduce_": ("all_reduce", lambda args, ranks: _reduced(_list_of(args[0]), ranks)),
    "all_gather_into_tensor": ("all_gather", lambda args, ranks: _gathered(args[0], ranks)),
    "reduce_scatter_tensor": ("reduce_scatter", lambda args, ranks: _scattered(args[0].nbytes, ranks)),
    "all_to_all_single": ("all_to_all", _functional_exchange),
}
