"""A log of tensor storage that comes and goes, replayed into peaks and categories.

Storage is what counts, not tensors: views share it, and it lives as long as the last of them. The log holds weak
references only, so watching a storage does not keep it.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Final, Literal

import torch
from torch import Tensor

__all__ = ["Block", "Category", "MemoryLog", "Peak"]

Category = Literal["parameter", "input", "gradient", "saved", "output", "forward temporary", "backward temporary"]
_TOP: Final = 8


@dataclass(slots=True)
class Block:
    """One storage: its bytes, what made it, the first tensor on it, and the events at which it came and went."""

    number: int
    nbytes: int
    made_by: object
    shape: tuple[int, ...]
    dtype: torch.dtype
    born: int
    died: int | None = None
    category: Category | None = None  # what was said about it; otherwise its life tells


@dataclass(frozen=True, slots=True)
class Peak:
    """The moment with most bytes alive: their sum, its parts by category, and the largest blocks with their bytes."""

    nbytes: int
    by_category: dict[Category, int]
    top: tuple[tuple[Block, int], ...]


@dataclass(slots=True, eq=False)
class MemoryLog:
    """Blocks, and events in order: the number of a block and the change of its bytes."""

    blocks: list[Block] = field(default_factory=list)
    events: list[tuple[int, int]] = field(default_factory=list)
    backward_from: int | None = None  # the first event of the backward pass
    _live: dict[int, Block] = field(default_factory=dict)  # by id of the storage object, one per storage while it lives

    def watch(self, tensor: Tensor, made_by: object) -> Block:
        """The block of a tensor's storage; a new one is logged, and so is its release when that comes."""
        storage = tensor.untyped_storage()
        key = id(storage)
        block = self._live.get(key)
        if block is None:
            block = self._live[key] = self._add(storage.nbytes(), made_by, tensor)
            weakref.finalize(storage, self._release, key).atexit = False
        else:
            self._resize(block, storage.nbytes())
        return block

    def find(self, tensor: Tensor) -> Block | None:
        """The block of a tensor's storage, if it is known."""
        return self._live.get(id(tensor.untyped_storage()))

    def hand_over(self, old: Tensor, new: Tensor, made_by: object) -> None:
        """`new` takes the place of `old`, whose storage counts nothing from here on."""
        if new.untyped_storage() is not old.untyped_storage():
            self._resize(self.watch(old, made_by), 0)
            self.watch(new, made_by)

    def start_backward(self) -> None:
        """What lives now was kept by the forward pass; what comes from here on belongs to backward."""
        self.backward_from = len(self.events)

    def category_of(self, block: Block) -> Category:
        """What was said about a block, or else what its life says."""
        if block.category is not None:
            return block.category
        start = self.backward_from
        if start is not None and block.born >= start:
            return "backward temporary"
        return "forward temporary" if block.died is not None and (start is None or block.died < start) else "saved"

    def peak(self, without: Container[Category] = ()) -> Peak:
        """The peak over the whole log, blocks of the categories in `without` left out."""
        counts = [self.category_of(block) not in without for block in self.blocks]
        live = best = 0
        best_at = -1
        for at, (number, change) in enumerate(self.events):
            if counts[number]:
                live += change
                if live > best:
                    best, best_at = live, at
        return self._at(best_at, counts)

    def at_backward_start(self, without: Container[Category] = ()) -> Peak:
        """What is alive when backward starts, in the form of a peak."""
        counts = [self.category_of(block) not in without for block in self.blocks]
        return self._at((len(self.events) if self.backward_from is None else self.backward_from) - 1, counts)

    def live_bytes(self) -> int:
        """Bytes alive at the end of the log."""
        return sum(change for _, change in self.events)

    def _at(self, event: int, counts: list[bool]) -> Peak:
        sizes: Counter[int] = Counter()
        for number, change in self.events[: event + 1]:
            if counts[number]:
                sizes[number] += change
        parts: Counter[Category] = Counter()
        for number, size in sizes.items():
            if size:
                parts[self.category_of(self.blocks[number])] += size
        top = tuple((self.blocks[number], size) for number, size in sizes.most_common(_TOP) if size)
        return Peak(sizes.total(), dict(parts), top)

    def _add(self, nbytes: int, made_by: object, tensor: Tensor) -> Block:
        number = len(self.blocks)
        block = Block(number, nbytes, made_by, tuple(tensor.shape), tensor.dtype, born=len(self.events))
        self.blocks.append(block)
        self.events.append((number, nbytes))
        return block

    def _resize(self, block: Block, nbytes: int) -> None:
        if nbytes != block.nbytes and block.died is None:
            self.events.append((block.number, nbytes - block.nbytes))
            block.nbytes = nbytes

    def _release(self, key: int) -> None:
        block = self._live.pop(key)
        block.died = len(self.events)
        self.events.append((block.number, -block.nbytes))
