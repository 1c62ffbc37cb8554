"""LatentCache: the latents of many sequences, spread page by page over context-parallel ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from laga_attn.agreement import agree
from laga_attn.collectives import exchange_rows
from laga_attn.grid import ContextParallel
from laga_attn.inference.derived import Derived
from laga_attn.inference.pages import PageBook, PageCopy
from laga_attn.inference.step import Step, plan_step
from laga_attn.inference.storage import LatentStore, RowCodec
from laga_attn.layout import LayoutKind

__all__ = ["CacheMemory", "LatentCache"]

_NEVER = 2**62  # a number of new tokens that no sequence has


@dataclass(frozen=True, slots=True)
class CacheMemory:
    """Bytes of a cache, all layers.

    `allocated` is what the tensors of this rank take; `used[p]` what the pages in use on rank p take, whole pages
    counted, shared ones once.
    """

    allocated: int
    used: tuple[int, ...]

    @property
    def total(self) -> int:
        """Bytes of the pages in use on all ranks."""
        return sum(self.used)


class LatentCache:
    """What decoding needs of every token: `c_kv` (after `kv_a_layernorm`) and `k_rope` (rotated), per layer.

    Every rank makes the same calls, and every rank knows what all ranks hold; tensors are stored where the pages are:
    page j of a sequence on the j-th rank in turn, so that no rank holds more than one page more of a sequence than
    another. A forward pass with new tokens is a step: `plan` it, `attend` in every layer, `commit` it. Until then
    the cache is as it was, whatever goes wrong.

    Args:
        num_layers: attention layers of the model.
        kv_lora_rank, qk_rope_head_dim: widths of `c_kv` and `k_rope`.
        cp: the ranks; None for one process.
        dtype: of storage: float64, float32, bfloat16, float16, or float8_e4m3fn (with two fp32 scales per token).
        page_size: tokens of a page.
        max_tokens: memory for so many tokens, over all ranks, is allocated now, and more do not fit. None: memory
            grows as needed.
        device: where to store.
        model: identifies the model whose latents these are, in files (see `export_cache`).

    Raises:
        ValueError: sizes below 1, or a dtype that cannot be stored.
    """

    def __init__(
        self,
        num_layers: int,
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        *,
        cp: ContextParallel | None = None,
        dtype: torch.dtype = torch.bfloat16,
        page_size: int = 64,
        max_tokens: int | None = None,
        device: torch.device | str = "cpu",
        model: str = "",
    ) -> None:
        sizes = {"num_layers": num_layers, "kv_lora_rank": kv_lora_rank, "qk_rope_head_dim": qk_rope_head_dim}
        if min(sizes.values()) < 1 or (max_tokens is not None and max_tokens < 1):
            raise ValueError(f"sizes of a cache must be at least 1, got {sizes}, max_tokens={max_tokens}")
        self.cp = ContextParallel.none() if cp is None else cp
        self.codec = RowCodec(dtype, kv_lora_rank, qk_rope_head_dim)
        self.num_layers = num_layers
        self.model = model
        capacity = None if max_tokens is None else -(-max_tokens // (max(1, page_size) * self.cp.size))
        self._book = PageBook.empty(self.cp.size, page_size, capacity)
        self.store = LatentStore(self.codec, num_layers, page_size, torch.device(device), capacity or 0)
        self.weights: tuple[Derived[Tensor], ...] = tuple(Derived() for _ in range(num_layers))

    @property
    def book(self) -> PageBook:
        """Who holds what, now."""
        return self._book

    @property
    def page_size(self) -> int:
        return self._book.page_size

    @property
    def sequences(self) -> tuple[int, ...]:
        """Ids of all sequences, oldest first."""
        return tuple(self._book.tables)

    def length(self, sequence: int) -> int:
        """Tokens of a sequence."""
        return self._book.table(sequence).length

    def memory(self) -> CacheMemory:
        """What the cache takes, to the byte."""
        page = self.page_size * self.codec.row_bytes * self.num_layers
        return CacheMemory(self.store.nbytes, tuple(self._book.used_pages(p) * page for p in range(self.cp.size)))

    # Sequences. These change the books of this rank at once, without a message; ranks that do not make the same
    # calls find out at the next plan().

    def add(self) -> int:
        """A new, empty sequence; returns its id."""
        self._book, sequence = self._book.add()
        return sequence

    def fork(self, sequence: int) -> int:
        """A copy of a sequence that shares its pages; returns the copy's id. Tokens appended later are not shared."""
        self._book, copy = self._book.fork(sequence)
        return copy

    def truncate(self, sequence: int, length: int) -> None:
        """Forget all but the first `length` tokens, as when drafted tokens were rejected."""
        self._book = self._book.truncate(sequence, length)

    def free(self, sequence: int) -> None:
        """Forget a sequence; pages that no fork shares become free."""
        self._book = self._book.free(sequence)

    # Steps.

    def plan(self, counts: Mapping[int, int], *, rebuild_from: int, kind: LayoutKind = "zigzag") -> Step:
        """Plan a forward pass with new tokens. Collective; the cache's content does not change.

        Args:
            counts: new tokens of each sequence. Their order is the order of the step's packed tokens.
            rebuild_from: a sequence with at least so many new tokens is split over the ranks and attends to rebuilt K
                and V (LAGA); with fewer it is computed on every rank with absorbed attention. See `crossover`.
            kind: how sequences are split, `"zigzag"` or `"contiguous"`.

        Raises:
            ValueError: unknown sequences, nothing to do, a full cache, or ranks that disagree about any of it: the
                same error on all ranks, and no rank has changed anything.
        """
        return self._plan(counts, rebuild_from, kind, None)

    def commit(self, step: Step) -> None:
        """Make the new tokens of a step part of the cache, after all layers have attended.

        Raises:
            ValueError: the cache has changed since the step was planned.
        """
        self.replace_book(step.base, step.book)

    def replace_book(self, base: PageBook, book: PageBook) -> None:
        """Adopt a book made from `base`, whose new pages have been written.

        Raises:
            ValueError: the cache has another book than `base` by now.
        """
        if base is not self._book:
            raise ValueError("the cache has changed since this step was planned; plan, attend and commit in one go")
        self._book = book

    def append(self, sequence: int, latents: Tensor) -> None:
        """Store latents that every rank has, `[num_layers, n, kv_lora_rank + qk_rope_head_dim]`. Collective.

        Raises:
            ValueError: another shape, or as in `plan`.
        """
        error = None
        if latents.ndim != 3 or latents.shape[::2] != (self.num_layers, self.codec.latent_dim):
            error = (
                f"latents have shape {list(latents.shape)}, but this cache stores [{self.num_layers}, n, "
                f"{self.codec.latent_dim}]: all layers, and c_kv beside k_rope"
            )
        step = self._plan({sequence: latents.shape[1] if latents.ndim > 1 else 0}, _NEVER, "zigzag", error)
        kept = torch.tensor(step.writes.kept, device=latents.device)
        where = torch.tensor(step.writes.kept_rows, device=latents.device)
        for layer, latent in enumerate(latents):
            self.store.write(layer, where, self.codec.encode(latent[kept]))
        self.commit(step)

    def read(self, sequence: int, layer: int, dtype: torch.dtype) -> Tensor:
        """All latents of a sequence in one layer, `[n, kv_lora_rank + qk_rope_head_dim]`, on every rank. Collective.

        Raises:
            ValueError: an unknown sequence.
        """
        length = self.length(sequence)
        owner, _ = self._book.locate(sequence, 0, length)
        counts = [self._book.local_count(sequence, rank, length) for rank in range(self.cp.size)]
        pages = self._book.local_pages(sequence, self.cp.rank)
        own = self.store.read(layer, pages)[: counts[self.cp.rank]]
        arrived = exchange_rows([own] * self.cp.size, counts, self.cp, kind="latent", phase="forward").wait()
        rows = torch.empty_like(arrived)
        rows[torch.tensor(owner.argsort(kind="stable"), device=rows.device)] = arrived
        return self.codec.decode(rows, dtype)

    def _plan(self, counts: Mapping[int, int], rebuild_from: int, kind: LayoutKind, error: str | None) -> Step:
        """As `plan`, for a caller that may have found an `error` that all ranks must hear of."""
        book, copies = self._book, tuple[PageCopy, ...]()
        try:
            if min(counts.values(), default=0) < 0 or not sum(counts.values()):
                raise ValueError(f"a step needs at least one new token, got counts {dict(counts)}")
            if rebuild_from < 1 or kind not in get_args(LayoutKind):
                raise ValueError(
                    f"rebuild_from={rebuild_from} must be at least 1, and kind={kind!r} zigzag or contiguous"
                )
            book, copies = self._book.append(counts)
        except ValueError as failure:
            error = error or str(failure)
        agree(self.cp, self._signature(counts, rebuild_from, kind), error)
        self.store.reserve(book.ranks[self.cp.rank].made)
        for copy in copies:
            if copy.rank == self.cp.rank:
                self.store.copy_page(copy.source, copy.target, copy.rows)
        return plan_step(self._book, book, counts, self.cp.rank, rebuild_from, kind)

    def _signature(self, counts: Mapping[int, int], rebuild_from: int, kind: str) -> dict[str, object]:
        book = self._book
        return {
            "cache (layers, latent, rope, dtype, page size, pages per rank)": (
                self.num_layers, self.codec.kv_lora_rank, self.codec.qk_rope_head_dim, str(self.codec.dtype),
                self.page_size, book.capacity,
            ),
            "lengths of the sequences": {sequence: table.length for sequence, table in book.tables.items()},
            "pages in use on each rank": tuple(book.used_pages(rank) for rank in range(self.cp.size)),
            "new tokens of the sequences": dict(counts),
            "rebuild_from": rebuild_from,
            "kind": kind,
        }  # fmt: skip
