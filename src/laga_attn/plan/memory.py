"""A log of tensor storage that comes and goes, replayed into peaks and categories.

Storage is what counts, not tensors: views share it, and it lives as long as the last of them. The log holds weak
references only, so watching a storage does not keep it.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, Literal

import torch
from torch import Tensor

__all__ = ["Block", "Category", "MemoryLog", "Peak"]

Category = Literal[
    "parameter", "input", "gradient", "saved", "output", "forward temporary", "backward temporary"
]
_TOP: Final = 8


@dataclass(slots=True)
class Block:
    """One storage: its bytes, the operator that made it, and the events at which it came and went."""

    nbytes: int
    made_by: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    born: int
    category: Category | None = None  # what is known when it is made; the rest follows from its life
    died: int | None = None


@dataclass(frozen=True, slots=True)
class Peak:
    """The moment of most bytes alive: the sum, its parts by category, and the largest blocks, in bytes."""

    nbytes: int
    by_category: dict[Category, int]
    top: tuple[tuple[Block, Category], ...]


@dataclass(slots=True, eq=False)
class MemoryLog:
    """Events in order: `+bytes` of a block that came, or minus that of one that went."""

    blocks: list[Block] = field(default_factory=list)
    events: list[tuple[int, int]] = field(default_factory=list)  # (block number, change in bytes)
    backward_from: int | None = None
    _live: dict[int, int] = field(default_factory=dict)  # id of a live storage object -> block number

    def watch(self, tensor: Tensor, made_by: str, category: Category | None = None) -> int:
        """Log the storage of a tensor if it is new, and its release when that comes; gives its block number."""
        storage = tensor.untyped_storage()
        key = id(storage)  # torch keeps one Python object per storage while either is alive
        number = self._live.get(key)
        if number is not None:
            self._resize(number, storage.nbytes())
            return number
        number = self._add(storage.nbytes(), made_by, tensor, category)
        self._live[key] = number
        weakref.finalize(storage, self._release, key, number).atexit = False
        return number

    def transfer(self, old: Tensor, new: Tensor, made_by: str) -> None:
        """`new` stands for the storage of `old`, which holds nothing from here on."""
        number = self._live.get(id(old.untyped_storage()))
        if number is not None:
            self._resize(number, 0)
        self.watch(new, made_by)

    def scratch(self, nbytes: int, made_by: str, like: Tensor) -> None:
        """Log bytes that an operator allocates and frees again by itself."""
        self._free(self._add(nbytes, made_by, like, None))

    def start_backward(self) -> None:
        """What lives now was kept by the forward pass; what comes from here on belongs to backward."""
        self.backward_from = len(self.events)

    def label(self, tensors: Iterable[Tensor], category: Category) -> None:
        """Give the live storages of these tensors a category after the fact."""
        for tensor in tensors:
            number = self._live.get(id(tensor.untyped_storage()))
            if number is not None:
                self.blocks[number].category = category

    def timeline(self) -> Iterator[int]:
        """Bytes alive after each event."""
        live = 0
        for _, change in self.events:
            live += change
            yield live

    @property
    def live_bytes(self) -> int:
        """Bytes alive now."""
        return sum(change for _, change in self.events)

    def peak(self, *, start: int = 0, stop: int | None = None, without: tuple[Category, ...] = ()) -> Peak:
        """The peak between two events, blocks of the categories in `without` left out."""
        stop = len(self.events) if stop is None else stop
        kept = [self.category_of(block) not in without for block in self.blocks]
        live = best = 0
        best_at = -1
        for at, (number, change) in enumerate(self.events[:stop]):
            live += change if kept[number] else 0
            if at >= start and live > best:
                best, best_at = live, at
        sizes: Counter[int] = Counter()
        for number, change in self.events[: best_at + 1]:
            if kept[number]:
                sizes[number] += change
        parts: Counter[Category] = Counter()
        for number, size in sizes.items():
            if size:
                parts[self.category_of(self.blocks[number])] += size
        largest = [(self.blocks[number], self.category_of(self.blocks[number])) for number, _ in sizes.most_common(_TOP)]
        return Peak(best, dict(parts), tuple(entry for entry in largest if entry[0].nbytes))

    def category_of(self, block: Block) -> Category:
        """What was said about a block, or else what its life says."""
        if block.category is not None:
            return block.category
        if self.backward_from is None or block.born < self.backward_from:
            outlived = self.backward_from is not None and (block.died is None or block.died >= self.backward_from)
            return "saved" if outlived else "forward temporary"
        return "backward temporary"

    def saved_bytes(self, *, without: tuple[Category, ...] = ("parameter", "input", "gradient", "output")) -> int:
        """Bytes alive when backward starts, given categories left out."""
        live = sum(
            change
            for number, change in self.events[: self.backward_from]
            if self.category_of(self.blocks[number]) not in without
        )
        return live

    def _add(self, nbytes: int, made_by: str, tensor: Tensor, category: Category | None) -> int:
        number = len(self.blocks)
        self.blocks.append(Block(nbytes, made_by, tuple(tensor.shape), tensor.dtype, len(self.events), category))
        self.events.append((number, nbytes))
        return number

    def _resize(self, number: int, nbytes: int) -> None:
        block = self.blocks[number]
        if nbytes != block.nbytes:
            self.events.append((number, nbytes - block.nbytes))
            block.nbytes = nbytes

    def _release(self, key: int, number: int) -> None:
        del self._live[key]
        self._free(number)

    def _free(self, number: int) -> None:
        block = self.blocks[number]
        block.died = len(self.events)
        self.events.append((number, -block.nbytes))
