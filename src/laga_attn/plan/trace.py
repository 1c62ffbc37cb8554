"""Trace: everything that a run does to memory, network and arithmetic units, recorded in one pass.

A trace is taken of the code that trains, on tensors without data (`FakeTensorMode`) or on real ones; it sees the
operators that PyTorch dispatches. Attention kernels are single operators. On real tensors `look_inside` also follows
what they allocate while they run.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from laga_attn.plan.flops import Part, count_flops, moved_bytes, part_of, tensors_in
from laga_attn.plan.memory import Category, MemoryLog
from laga_attn.plan.wire import Transfer, is_collective, is_wait, transfer_of
from laga_attn.traffic import Phase, Traffic, traffic

__all__ = ["Scratch", "Trace"]

_LIBRARY: Final = "laga_attn"
Scratch = Callable[[Any, tuple[Any, ...]], int]
"""Bytes that a kernel operator allocates for itself while it runs, from the operator and its arguments."""


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
        look_inside: follow the operators inside this library's kernels too; for real tensors.
        scratch: bytes that a kernel operator takes for itself, where it cannot be looked into.

    Attributes:
        memory: the log of storages.
        transfers: the collectives, in order.
        flops: by part of the layer and phase.
        hbm_bytes: read and written by operators, by phase, kernels counted as reading and writing each tensor once.
        calls: operators that move or compute something, by phase: each is a kernel launch.
        uncounted: operators of other libraries without a FLOP formula.
        saved_bytes: in distinct storages that autograd keeps for backward, those of parameters not counted.
    """

    def __init__(self, *, look_inside: bool = False, scratch: Scratch | None = None) -> None:
        super().__init__()
        self.memory = MemoryLog()
        self.transfers: list[Transfer] = []
        self.flops: Counter[tuple[Part, Phase]] = Counter()
        self.hbm_bytes: Counter[Phase] = Counter()
        self.calls: Counter[Phase] = Counter()
        self.uncounted: set[str] = set()
        self.saved_bytes = 0
        self._phase: Phase = "forward"
        self._look_inside, self._scratch = look_inside, scratch
        self._inside = False
        self._saved: dict[int, Tensor] = {}
        self._hooks = saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self._resources = ExitStack()
        self._ledger = Traffic()
        self._seen_records = 0

    def __enter__(self) -> Trace:
        if gc.isenabled():
            gc.collect()
            gc.disable()
            self._resources.callback(gc.enable)
        self._ledger = self._resources.enter_context(traffic())
        self._hooks.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self._phase == "forward":
            self._hooks.__exit__(*error)
        self._saved.clear()
        self._resources.close()

    def watch(self, tensors: Iterable[Tensor | None], category: Category) -> None:
        """Count tensors that exist before the run, or say what those that it made are; None is skipped."""
        for tensor in tensors:
            if tensor is not None:
                number = self.memory.watch(tensor, category)
                self.memory.blocks[number].category = category

    def start_backward(self, *outputs: Tensor) -> None:
        """The forward pass is over. Its outputs belong to the next layer, and are not counted as kept by this one."""
        self._hooks.__exit__(None, None, None)
        parameters = [block for block in self.memory.blocks if block.category == "parameter"]
        known = {id(block) for block in parameters}
        self.saved_bytes = sum(
            tensor.untyped_storage().nbytes()
            for tensor in self._saved.values()
            if id(self.memory.block_of(tensor)) not in known
        )
        self._saved.clear()
        for output in outputs:
            block = self.memory.block_of(output)
            if block is not None and block.category is None:
                block.category = "output"
        self.memory.start_backward()
        self._phase = "backward"
