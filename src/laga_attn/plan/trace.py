"""Trace: everything that a run does to memory, network and arithmetic units, recorded in one pass.

A trace is taken of the code that trains, on tensors without data (`FakeTensorMode`) or on real ones; it sees the
operators that PyTorch dispatches. The attention kernels of this library are single operators, unless it looks inside.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final, Self

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from laga_attn.plan.flops import Part, count_flops, moved_bytes, part_of, tensors_in
from laga_attn.plan.memory import Category, MemoryLog
from laga_attn.plan.wire import Transfer, is_collective, is_wait, transfer_of
from laga_attn.plan.world import empty_message
from laga_attn.traffic import Phase, traffic

__all__ = ["Trace"]

_LIBRARY: Final = "laga_attn"
_SAME_STORAGE: Final = ("_unsafe_view", "lift", "lift_fresh")  # views that their schema does not call so
_KNOWN_NAMESPACES: Final = ("aten", "prims", "profiler", _LIBRARY)


@dataclass(frozen=True, slots=True)
class _Kind:
    """What is worth knowing about an operator, found out once."""

    idle: bool  # a view, or a question about a tensor, such as its device
    new: bool  # returns storage that was not among its arguments
    collective: bool
    composite: bool  # a composition of operators, which the mode sees only where autograd is off


class Trace(TorchDispatchMode):
    """Record a forward and a backward pass:

        with FakeTensorMode(), Trace() as trace:
            trace.watch(layer.parameters(), "parameter")
            trace.watch([hidden], "input")
            out = layer(hidden)
            trace.start_backward(out)
            out.backward(torch.empty_like(out))
            trace.watch([p.grad for p in layer.parameters()], "gradient")

    Enter it inside `FakeTensorMode`, so that it sees operators first. The garbage collector rests meanwhile: what only
    reference cycles keep alive stays alive, in every run alike.

    Args:
        look_inside: run this library's kernels operator by operator and count what they allocate meanwhile. It takes
            as long as a kernel has tiles, so it is for sequences of some thousand tokens.

    Attributes:
        memory: the log of storages.
        transfers: the collectives, in order.
        flops: by part of the layer and phase.
        hbm_bytes: read and written by operators that compute nothing but elements (`None`), and by products of each
            part, by phase; kernels count as reading and writing each tensor once.
        calls: operators that move or compute something, by phase: each is a kernel launch.
        uncounted: operators of other libraries whose FLOPs are not known.
        saved_bytes: in distinct storages that autograd keeps for backward: of what the trace knows, and no parameters.
    """

    def __init__(self, *, look_inside: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memory = MemoryLog()
        self.transfers: list[Transfer] = []
        self.flops: Counter[tuple[Part, Phase]] = Counter()
        self.hbm_bytes: Counter[tuple[Part | None, Phase]] = Counter()
        self.calls: Counter[Phase] = Counter()
        self.uncounted: set[str] = set()
        self.saved_bytes = 0
        self._phase: Phase = "forward"
        self._look_inside, self._inside = look_inside, False
        self._kinds: dict[Any, _Kind] = {}
        self._saved: set[int] = set()  # block numbers
        self._entered = ExitStack()
        self._hooks = ExitStack()

    def __enter__(self) -> Self:
        if gc.isenabled():
            gc.collect()
            gc.disable()
            self._entered.callback(gc.enable)
        self._ledger = self._entered.enter_context(traffic())
        self._recorded = 0
        self._hooks.enter_context(saved_tensors_hooks(self._pack, lambda tensor: tensor))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._hooks.close()
        self._entered.close()

    def watch(self, tensors: Iterable[Tensor | None], category: Category) -> None:
        """Count tensors that exist before the run, or say what those are that it made; None is skipped."""
        for tensor in tensors:
            if tensor is not None:
                self.memory.watch(tensor, category).category = category

    def start_backward(self, *outputs: Tensor) -> None:
        """The forward pass is over. Its outputs belong to what comes next, and are not kept by what ran."""
        self._hooks.close()
        kept = [self.memory.blocks[number] for number in self._saved]
        self.saved_bytes = sum(block.nbytes for block in kept if block.category != "parameter")
        for output in outputs:
            block = self.memory.watch(output, "output")
            block.category = block.category or "output"
        self.memory.start_backward()
        self._phase = "backward"

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default:  # half of all that is asked, for C++ asks again and again
            return args[0].device
        kwargs = kwargs or {}
        kind = self._kinds.get(func)
        if kind is None:
            kind = self._kinds[func] = _kind_of(func)
        if kind.composite:
            with self._on():
                return func.decompose(*args, **kwargs)
        if self._look_inside and func.namespace == _LIBRARY and not self._inside:
            result = self._run_inside(func, args, kwargs)
        elif func is torch.ops.c10d.alltoall_.default and isinstance(args[0][0], FakeTensor):
            result = empty_message(args)  # the fake mode would look at each of hundreds of pieces, several times
        else:
            result = func(*args, **kwargs)
        if not kind.idle:
            self._record(func, args, kwargs, result, kind)
        return result

    def _record(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, kind: _Kind) -> None:
        if kind.collective:
            self._record_collective(func, args, kwargs, result)
            return
        made = (result,) if isinstance(result, Tensor) else tensors_in((result,))
        for tensor in made if kind.new else ():
            self.memory.watch(tensor, func)
        if self._inside:
            return  # the kernel counts as one operator
        self.calls[self._phase] += 1
        flops = count_flops(func, args, kwargs, result)
        if flops is None and func.namespace not in _KNOWN_NAMESPACES:
            self.uncounted.add(str(func))
        part: Part | None = None
        if flops:
            part = part_of(func)
            self.flops[part, self._phase] += flops
        self.hbm_bytes[part, self._phase] += moved_bytes(func, args, kwargs, made)

    @contextmanager
    def _on(self) -> Iterator[None]:
        """The mode, which is off while it handles an operator, on again; without what else `__enter__` sets up."""
        super().__enter__()  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _run_inside(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a kernel with this mode on: past its own entry, straight to the device's implementation."""
        device = torch._C.DispatchKey.CUDA if args[0].is_cuda else torch._C.DispatchKey.CPU
        self._inside = True
        try:
            with self._on():
                return func.redispatch(torch._C.DispatchKeySet(device), *args, **kwargs)
        finally:
            self._inside = False

    def _record_collective(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        if is_wait(func):
            self.memory.hand_over(args[0], result, func)  # the same tensor, where tensors are real
            return
        entries = self._ledger.records
        kind = entries[-1].kind if len(entries) > self._recorded else ""
        self._recorded = len(entries)
        transfer = transfer_of(func, args, kwargs, self._phase, kind)
        if transfer is not None:
            self.transfers.append(transfer)
        for tensor in tensors_in((result,)):
            self.memory.watch(tensor, func)

    def _pack(self, tensor: Tensor) -> Tensor:
        block = self.memory.find(tensor)
        if block is not None:
            self._saved.add(block.number)
        return tensor


def _kind_of(func: Any) -> _Kind:
    composite = func.namespace == "aten" and torch._C._dispatch_has_kernel_for_dispatch_key(
        func.name(), "CompositeImplicitAutograd"
    )
    new = any(returned.alias_info is None for returned in func._schema.returns)
    new = new and func.overloadpacket.__name__ not in _SAME_STORAGE
    return _Kind(
        idle=func.is_view or func.namespace == "prim", new=new, collective=is_collective(func), composite=composite
    )
