"""All-gather and all-to-all of rows: validated before they start, asynchronous, and counted in bytes.

Reduce-scatter is not here on purpose: an all-to-all of the contributions followed by a sum in rank order
moves the same bytes, rounds once and repeats bit for bit on every backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from laga_attn.grid import ContextParallel
from laga_attn.traffic import Phase, Record, record

__all__ = ["Pending", "all_gather_rows", "exchange_rows", "split_rows"]

T = TypeVar("T")

# all_gather_single is the newer name of all_gather_into_tensor, which warns where both exist.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Pending(Generic[T]):
    """A result on its way.

    Holds the buffers that are still being sent, so the caller may drop its own references at once.
    """

    __slots__ = ("_result", "_sending", "_work")

    def __init__(self, result: T, work: dist.Work | None = None, sending: object = None) -> None:
        self._result: T | None = result
        self._work = work
        self._sending = sending

    def wait(self) -> T:
        """The result, once it has arrived (on a device: in the order of the current stream). Call it once.

        Raises:
            RuntimeError: called a second time; keep the result of the first call instead.
        """
        if self._result is None:
            raise RuntimeError("this result was already waited for; keep the tensor that wait() returned")
        if self._work is not None:
            self._work.wait()
        result = self._result
        self._result = self._work = self._sending = None
        return result


def all_gather_rows(x: Tensor, cp: ContextParallel, *, kind: str, phase: Phase) -> Pending[Tensor]:
    """Gather every rank's rows: ``[n, ...]`` on each rank -> ``[P * n, ...]`` in rank order.

    Args:
        x: any strides; the same shape and dtype on all ranks (which only the ranks together can check: see
            :func:`laga_attn.agreement.agree`).
        cp: the ranks.
        kind: what travels, for the :func:`laga_attn.traffic.traffic` ledger.
        phase: ``"forward"`` or ``"backward"``, for the ledger.

    Returns:
        The gathered rows, contiguous. With one rank that is ``x`` itself if ``x`` is contiguous.

    Raises:
        ValueError: ``x`` has no rows dimension, needs a gradient here, or is on a device that the group's
            backend does not serve.
    """
    _check_tensor(x, cp, f"all-gather of {kind}")
    x = x.contiguous()
    if cp.size == 1:
        return Pending(x)
    out = x.new_empty((cp.size * x.shape[0], *x.shape[1:]))
    each = tuple(0 if peer == cp.rank else x.nbytes for peer in range(cp.size))
    record(Record(kind, "all_gather", phase, each, each))
    return _started(out, _all_gather(out, x, group=cp.group, async_op=True), x, cp)


def exchange_rows(
    send: Sequence[Tensor], recv_rows: Sequence[int], cp: ContextParallel, *, kind: str, phase: Phase
) -> Pending[Tensor]:
    """Send ``send[p]`` to rank p and receive ``recv_rows[p]`` rows from it.

    Args:
        send: P tensors ``[n_p, ...]`` of one dtype, device and trailing shape, any strides; ``n_p`` may be 0.
            ``send[cp.rank]`` stays here: it is copied into the result and never travels.
        recv_rows: P row counts: what the other ranks send to this one.
        cp: the ranks.
        kind: what travels, for the :func:`laga_attn.traffic.traffic` ledger.
        phase: ``"forward"`` or ``"backward"``, for the ledger.

    Returns:
        ``[sum(recv_rows), ...]``, contiguous, in rank order; never an alias of ``send``.

    Raises:
        ValueError: a count of pieces other than P, unequal trailing shapes, dtypes or devices, negative rows,
            ``send[rank]`` and ``recv_rows[rank]`` of different size, a tensor that needs a gradient here, or
            a device that the group's backend does not serve.
    """
    what = f"exchange of {kind}"
    _check_exchange(send, recv_rows, cp, what)
    first, me = send[0], cp.rank
    out = first.new_empty((sum(recv_rows), *first.shape[1:]))
    if cp.size == 1:
        return Pending(out.copy_(first))

    row_bytes = first.element_size() * first.shape[1:].numel()
    send_rows = [piece.shape[0] for piece in send]
    sent_to = tuple(0 if peer == me else row_bytes * rows for peer, rows in enumerate(send_rows))
    received_from = tuple(0 if peer == me else row_bytes * rows for peer, rows in enumerate(recv_rows))
    record(Record(kind, "all_to_all", phase, sent_to, received_from))
    if cp.backend_for(first.device.type) == "gloo":  # has only the form with one packed buffer
        packed = torch.cat(tuple(send))
        work = dist.all_to_all_single(out, packed, list(recv_rows), send_rows, group=cp.group, async_op=True)
        return _started(out, work, packed, cp)
    # The list form reads the pieces where they lie. Our own piece is copied here and left out of the message.
    receive = split_rows(out, recv_rows)
    receive[me].copy_(send[me])
    receive[me] = out[:0]
    pieces = [piece.contiguous() for piece in send]
    pieces[me] = pieces[me][:0]
    work = dist.all_to_all(receive, pieces, group=cp.group, async_op=True)
    return _started(out, work, pieces, cp)


def split_rows(x: Tensor, rows: Sequence[int]) -> list[Tensor]:
    """Cut `x` along dim 0 into views of so many rows. Those of no rows are one object: there may be hundreds."""
    parts = iter(x.split([count for count in rows if count]) if any(rows) else ())
    nothing = x[:0]
    return [next(parts) if count else nothing for count in rows]


def _started(out: Tensor, work: dist.Work | None, sending: object, cp: ContextParallel) -> Pending[Tensor]:
    if work is not None and not cp.overlap:
        work.wait()
    return Pending(out, work, sending)


def _check_tensor(x: Tensor, cp: ContextParallel, what: str) -> None:
    """What can be wrong with one tensor alone. The backends, and above all fake ones, check little of it."""
    if x.dim() == 0:
        raise ValueError(f"{what}: a tensor without dimensions has no rows; give it one, as in x[None]")
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{what}: a tensor of shape {tuple(x.shape)} needs a gradient, but collectives on rows are not "
            "differentiable; call them inside an autograd.Function, or detach the tensor"
        )
    if cp.size > 1 and cp.backend_for(x.device.type) is None:
        raise ValueError(
            f"{what}: the tensor is on {x.device}, which the group's backend {cp.backend!r} cannot reach; "
            "move it, or create the group with a backend for that device"
        )


def _check_exchange(send: Sequence[Tensor], recv_rows: Sequence[int], cp: ContextParallel, what: str) -> None:
    for name, pieces in (("send", len(send)), ("recv_rows", len(recv_rows))):
        if pieces != cp.size:
            raise ValueError(
                f"{what}: {name} has {pieces} entries for {cp.size} ranks; give one for every rank "
                "(zero rows for a rank that takes no part)"
            )
    distinct = {id(piece): piece for piece in send}.values()  # ranks that take no part may share one empty piece
    for piece in distinct:
        _check_tensor(piece, cp, what)
    properties: tuple[tuple[str, Callable[[Tensor], object]], ...] = (
        ("trailing shapes", lambda piece: tuple(piece.shape[1:])),
        ("dtypes", lambda piece: piece.dtype),
        ("devices", lambda piece: piece.device),
    )
    for name, value in properties:
        if len({value(piece) for piece in distinct}) > 1:
            found = ", ".join(str(value(piece)) for piece in send)
            raise ValueError(f"{what}: the pieces for ranks 0, 1, ... must have equal {name}, not {found}")
    if any(rows < 0 for rows in recv_rows):
        raise ValueError(f"{what}: recv_rows {list(recv_rows)} has a negative count; use 0 for nothing")
    if send[cp.rank].shape[0] != recv_rows[cp.rank]:
        raise ValueError(
            f"{what}: rank {cp.rank} keeps {send[cp.rank].shape[0]} rows for itself in send, but expects "
            f"{recv_rows[cp.rank]} in recv_rows; the two must be equal"
        )
