"""Which page on which rank holds which tokens: the bookkeeping of a latent cache, without a tensor in it.

A page holds `page_size` consecutive tokens of a sequence. Page j of a sequence lives on rank `(first_rank + j) % P`,
so the ranks' shares of a sequence never differ by more than one page. Every rank keeps the same book of all ranks'
pages: whether something fits is decided everywhere alike, without a message.

Nothing here changes in place. Each operation returns a new book, or raises and leaves the old one as it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np

from laga_attn.layout import Index

__all__ = ["PageBook", "PageCopy", "PageMove", "PageTable", "RankPages"]


@dataclass(frozen=True, slots=True)
class PageTable:
    """One sequence: its length in tokens, the rank of its first page, and the number of each page on its rank."""

    length: int = 0
    first_rank: int = 0
    pages: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PageCopy:
    """The first `rows` tokens of page `source` must be copied to page `target` of the same rank."""

    rank: int
    source: int
    target: int
    rows: int


@dataclass(frozen=True, slots=True)
class PageMove:
    """The content of page `source` of rank `source_rank` of another cache belongs into page `target` of `rank`."""

    source_rank: int
    source: int
    rank: int
    target: int


@dataclass(frozen=True, slots=True)
class RankPages:
    """The pages of one rank: how many tables hold each, and which of the first `made` are free, ascending."""

    made: int = 0
    free: tuple[int, ...] = ()
    users: Mapping[int, int] = field(default_factory=lambda: MappingProxyType({}))

    def take(self, count: int) -> tuple[RankPages, tuple[int, ...]]:
        """`count` pages for one table, the lowest free ones first."""
        reused = self.free[:count]
        made = self.made + count - len(reused)
        pages = (*reused, *range(self.made, made))
        return RankPages(made, self.free[count:], {**self.users, **dict.fromkeys(pages, 1)}), pages

    def share(self, pages: Iterable[int]) -> RankPages:
        """One more table holds these pages."""
        users = dict(self.users)
        for page in pages:
            users[page] += 1
        return replace(self, users=users)

    def drop(self, pages: Iterable[int]) -> RankPages:
        """One table fewer holds these pages; those that nobody holds become free."""
        users, freed = dict(self.users), []
        for page in pages:
            users[page] -= 1
            if not users[page]:
                del users[page]
                freed.append(page)
        return RankPages(self.made, tuple(sorted((*self.free, *freed))), users)


@dataclass(frozen=True, slots=True)
class PageBook:
    """All sequences of a cache and the pages of all its ranks.

    `capacity` is the number of pages that a rank can have, None for no limit. Sequence ids are never used twice.
    """

    page_size: int
    ranks: tuple[RankPages, ...]
    capacity: int | None = None
    tables: Mapping[int, PageTable] = field(default_factory=lambda: MappingProxyType({}))
    next_id: int = 0

    @classmethod
    def empty(cls, cp_size: int, page_size: int, capacity: int | None = None) -> PageBook:
        """The book of a cache without sequences.

        Raises:
            ValueError: a page size or capacity below 1.
        """
        if page_size < 1 or (capacity is not None and capacity < 1):
            raise ValueError(f"page_size={page_size} tokens and capacity={capacity} pages must be at least 1")
        return cls(page_size, (RankPages(),) * cp_size, capacity)

    @property
    def cp_size(self) -> int:
        return len(self.ranks)

    def table(self, sequence: int) -> PageTable:
        """The table of a sequence.

        Raises:
            ValueError: no such sequence.
        """
        if sequence not in self.tables:
            known = ", ".join(map(str, list(self.tables)[:8])) or "none"
            raise ValueError(f"the cache has no sequence {sequence!r} (it was freed, or never added); it holds {known}")
        return self.tables[sequence]

    def used_pages(self, rank: int) -> int:
        """Pages of a rank that some sequence holds."""
        return len(self.ranks[rank].users)

    # Changes: each returns a new book.

    def add(self) -> tuple[PageBook, int]:
        """One more sequence, empty, and its id."""
        return self._adding(PageTable())

    def append(self, counts: Mapping[int, int]) -> tuple[PageBook, tuple[PageCopy, ...]]:
        """Room for `counts[sequence]` more tokens in each sequence, and the copies to make before writing there.

        A page that is not full and is shared with a fork is copied first: the fork must not see the new tokens.

        Raises:
            ValueError: an unknown sequence, a negative count, or too few free pages on some rank.
        """
        ranks, tables, copies = list(self.ranks), dict(self.tables), []
        taken: list[tuple[int, ...]] = [()] * self.cp_size
        for sequence, count in counts.items():
            table = self.table(sequence)
            if count < 0:
                raise ValueError(f"cannot append {count} tokens to sequence {sequence}; truncate() removes tokens")
            if not count:
                continue
            pages = list(table.pages)
            first = table.first_rank if pages else min(range(self.cp_size), key=lambda r: len(ranks[r].users))
            partial = table.length % self.page_size
            last = (first + len(pages) - 1) % self.cp_size
            if partial and ranks[last].users[pages[-1]] > 1:
                ranks[last], (target,) = ranks[last].drop(pages[-1:]).take(1)
                copies.append(PageCopy(last, pages[-1], target, partial))
                pages[-1] = target
            fresh = range(len(pages), -(-(table.length + count) // self.page_size))
            for rank in range(self.cp_size):
                places = fresh[(rank - first - len(table.pages)) % self.cp_size :: self.cp_size]
                ranks[rank], taken[rank] = ranks[rank].take(len(places))
            pages.extend(taken[(first + j) % self.cp_size][(j - fresh.start) // self.cp_size] for j in fresh)
            tables[sequence] = PageTable(table.length + count, first, tuple(pages))
        self._check_capacity(ranks)
        return replace(self, ranks=tuple(ranks), tables=tables), tuple(copies)

    def truncate(self, sequence: int, length: int) -> PageBook:
        """Only the first `length` tokens of a sequence.

        Raises:
            ValueError: an unknown sequence, or a length outside what it has.
        """
        table = self.table(sequence)
        if not 0 <= length <= table.length:
            raise ValueError(
                f"sequence {sequence} has {table.length} tokens, so it can be cut to 0 to {table.length}, not {length}"
            )
        kept = -(-length // self.page_size)
        tables = {**self.tables, sequence: PageTable(length, table.first_rank, table.pages[:kept])}
        return replace(self, ranks=self._dropping(table, kept), tables=tables)

    def fork(self, sequence: int) -> tuple[PageBook, int]:
        """A second sequence with the same tokens in the same pages, and its id.

        Raises:
            ValueError: an unknown sequence.
        """
        table = self.table(sequence)
        book, copy = self._adding(table)
        ranks = tuple(pages.share(self._on_rank(table, rank)) for rank, pages in enumerate(self.ranks))
        return replace(book, ranks=ranks), copy

    def free(self, sequence: int) -> PageBook:
        """Without this sequence.

        Raises:
            ValueError: an unknown sequence.
        """
        table = self.table(sequence)
        tables = {other: held for other, held in self.tables.items() if other != sequence}
        return replace(self, ranks=self._dropping(table, 0), tables=tables)

    def adopt(
        self, tables: Sequence[PageTable], cp_size: int
    ) -> tuple[PageBook, tuple[int, ...], tuple[PageMove, ...]]:
        """Sequences of another book, of `cp_size` ranks, as new ones here; pages that they share stay shared.

        Returns:
            The book, the new ids in order, and where the content of each page goes.

        Raises:
            ValueError: too few free pages on some rank.
        """
        book, ids, moved = self, [], dict[tuple[int, int], tuple[int, int]]()
        for table in tables:
            first, ranks, pages = table.first_rank % self.cp_size, list(book.ranks), []
            for number, page in enumerate(table.pages):
                source, rank = ((table.first_rank + number) % cp_size, page), (first + number) % self.cp_size
                if source in moved:
                    ranks[rank] = ranks[rank].share(moved[source][1:])
                else:
                    ranks[rank], (target,) = ranks[rank].take(1)
                    moved[source] = (rank, target)
                pages.append(moved[source][1])
            book, copy = replace(book, ranks=tuple(ranks))._adding(PageTable(table.length, first, tuple(pages)))
            ids.append(copy)
        self._check_capacity(list(book.ranks))
        return book, tuple(ids), tuple(PageMove(*source, *target) for source, target in moved.items())

    # Where tokens are.

    def local_count(self, sequence: int, rank: int, length: int) -> int:
        """How many of the first `length` tokens of a sequence a rank holds."""
        full, rest = divmod(length, self.page_size)
        place = (rank - self.table(sequence).first_rank) % self.cp_size  # of the rank in the sequence's round
        pages = -(-(full - place) // self.cp_size) if full > place else 0
        return pages * self.page_size + (rest if full % self.cp_size == place else 0)

    def local_pages(self, sequence: int, rank: int) -> Index:
        """The pages of a sequence on a rank, by position. All are full, but for the sequence's last one."""
        return np.asarray(self._on_rank(self.table(sequence), rank), dtype=np.int64)

    def locate(self, sequence: int, start: int, stop: int) -> tuple[Index, Index]:
        """The rank of each token `start..stop` of a sequence, and the row (page * page_size + offset) it has there."""
        table = self.table(sequence)
        positions = np.arange(start, stop, dtype=np.int64)
        first_page = start // self.page_size
        page = positions // self.page_size
        numbers = np.asarray(table.pages[first_page : -(-stop // self.page_size)], dtype=np.int64)
        rows = numbers[page - first_page] * self.page_size + positions % self.page_size
        return (table.first_rank + page) % self.cp_size, rows

    def _on_rank(self, table: PageTable, rank: int, first: int = 0) -> tuple[int, ...]:
        """Pages `first`, ... of a table that live on a rank."""
        return table.pages[first + (rank - table.first_rank - first) % self.cp_size :: self.cp_size]

    def _adding(self, table: PageTable) -> tuple[PageBook, int]:
        return replace(self, tables={**self.tables, self.next_id: table}, next_id=self.next_id + 1), self.next_id

    def _dropping(self, table: PageTable, kept: int) -> tuple[RankPages, ...]:
        return tuple(pages.drop(self._on_rank(table, rank, kept)) for rank, pages in enumerate(self.ranks))

    def _check_capacity(self, ranks: list[RankPages]) -> None:
        for rank, (before, after) in enumerate(zip(self.ranks, ranks, strict=True)):
            if self.capacity is not None and after.made > self.capacity:
                free = self.capacity - len(before.users)
                raise ValueError(
                    f"the cache is full: rank {rank} needs {len(after.users) - len(before.users)} more pages of "
                    f"{self.page_size} tokens, and {free} of its {self.capacity} are free; free or truncate "
                    "sequences, or make the cache with a larger max_tokens"
                )
