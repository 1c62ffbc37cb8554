"""The books of a cache, driven at random against lists of tokens; memory is a dict from (rank, page, offset)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laga_attn.inference.pages import PageBook
from tests.inference.operations import Lists, operations


@dataclass
class Memory:
    """A book with content, as one process that sees all ranks would have it."""

    book: PageBook
    content: dict[tuple[int, int], int] = field(default_factory=dict)  # (rank, row): token

    def append(self, sequence: int, tokens: list[int]) -> None:
        start = self.book.table(sequence).length
        self.book, copies = self.book.append({sequence: len(tokens)})
        size = self.book.page_size
        for copy in copies:
            for place in range(copy.rows):
                self.content[copy.rank, copy.target * size + place] = self.content[
                    copy.rank, copy.source * size + place
                ]
        for place, token in zip(self.places(sequence, start), tokens, strict=True):
            self.content[place] = token

    def places(self, sequence: int, start: int = 0) -> list[tuple[int, int]]:
        ranks, rows = self.book.locate(sequence, start, self.book.table(sequence).length)
        return list(zip(ranks.tolist(), rows.tolist(), strict=True))

    def tokens(self, sequence: int) -> list[int]:
        return [self.content[place] for place in self.places(sequence)]


def apply(memory: Memory, lists: Lists, operation: tuple[str, int, int]) -> None:
    name, which, amount = operation
    sequence = lists.pick(which)
    if name == "add" or sequence is None:
        memory.book, sequence = memory.book.add()
        assert sequence == lists.add()
    elif name == "append":
        tokens = lists.fresh(amount)
        memory.append(sequence, tokens)
        lists.sequences[sequence] += tokens
    elif name == "truncate":
        length = amount % (len(lists.sequences[sequence]) + 1)
        memory.book = memory.book.truncate(sequence, length)
        del lists.sequences[sequence][length:]
    elif name == "fork":
        memory.book, copy = memory.book.fork(sequence)
        assert copy == lists.add(lists.sequences[sequence])
    else:
        memory.book = memory.book.free(sequence)
        del lists.sequences[sequence]


def assert_consistent(book: PageBook) -> None:
    """Page counts are what the tables say, free pages are free, and shares are balanced."""
    holders: Counter[tuple[int, int]] = Counter()
    for sequence, table in book.tables.items():
        assert len(table.pages) == -(-table.length // book.page_size)
        holders.update(((table.first_rank + j) % book.cp_size, page) for j, page in enumerate(table.pages))
        counts = [book.local_count(sequence, rank, table.length) for rank in range(book.cp_size)]
        assert sum(counts) == table.length
        assert max(counts) - min(counts) <= book.page_size
    for rank, pages in enumerate(book.ranks):
        assert dict(pages.users) == {page: n for (r, page), n in holders.items() if r == rank}
        assert sorted([*pages.free, *pages.users]) == list(range(pages.made))


@settings(max_examples=40, deadline=None)
@given(operations(), st.integers(1, 4), st.sampled_from([1, 3, 4]))
def test_any_operations_leave_what_lists_would_hold(steps, cp_size, page_size):
    memory, lists = Memory(PageBook.empty(cp_size, page_size)), Lists()
    for operation in steps:
        apply(memory, lists, operation)
        assert {s: memory.tokens(s) for s in memory.book.tables} == lists.sequences, operation
        assert_consistent(memory.book)


@settings(max_examples=40, deadline=None)
@given(operations(), st.integers(1, 4))
def test_local_pages_and_counts_are_the_sequence_in_order(steps, cp_size):
    memory, lists = Memory(PageBook.empty(cp_size, 3)), Lists()
    for operation in steps:
        apply(memory, lists, operation)
    for sequence, tokens in lists.sequences.items():
        held = [rank for rank, _ in memory.places(sequence)]
        for rank in range(cp_size):
            rows = (memory.book.local_pages(sequence, rank)[:, None] * 3 + np.arange(3)).reshape(-1)
            mine = [token for token, r in zip(tokens, held, strict=True) if r == rank]
            assert [memory.content[rank, row] for row in rows[: len(mine)].tolist()] == mine
            for length in range(len(tokens) + 1):
                assert memory.book.local_count(sequence, rank, length) == held[:length].count(rank)


@settings(max_examples=40, deadline=None)
@given(operations(), st.integers(1, 4), st.integers(1, 4))
def test_adopted_sequences_keep_content_and_sharing(steps, source_ranks, target_ranks):
    memory, lists = Memory(PageBook.empty(source_ranks, 3)), Lists()
    for operation in steps:
        apply(memory, lists, operation)
    target = Memory(PageBook.empty(target_ranks, 3))
    target.book, before = target.book.add()
    target.append(before, [-1, -2, -3, -4])
    target.book, ids, moves = target.book.adopt(list(memory.book.tables.values()), source_ranks)
    for move in moves:
        for place in range(3):
            if (move.source_rank, move.source * 3 + place) in memory.content:
                token = memory.content[move.source_rank, move.source * 3 + place]
                target.content[move.rank, move.target * 3 + place] = token
    assert [target.tokens(s) for s in ids] == list(lists.sequences.values())
    assert target.tokens(before) == [-1, -2, -3, -4]
    assert_consistent(target.book)
    pages = sum(memory.book.used_pages(rank) for rank in range(source_ranks))
    assert len(moves) == pages  # shared pages are one page there as well


@settings(max_examples=40, deadline=None)
@given(operations(), st.integers(1, 3), st.integers(1, 4))
def test_what_does_not_fit_is_refused_and_changes_nothing(steps, cp_size, capacity):
    memory, lists = Memory(PageBook.empty(cp_size, 2, capacity)), Lists()
    for operation in steps:
        before, content, refusal = memory.book, dict(memory.content), None
        try:
            apply(memory, lists, operation)
        except ValueError as error:
            refusal = str(error)
        if refusal is not None:
            assert "full" in refusal
            assert memory.book is before
            assert memory.content == content
        assert all(pages.made <= capacity for pages in memory.book.ranks)
        assert {s: memory.tokens(s) for s in memory.book.tables} == lists.sequences


def test_pages_go_round_robin_and_new_sequences_start_where_least_is():
    book = PageBook.empty(3, page_size=4)
    for _ in range(3):
        book, _ = book.add()
    book, _ = book.append({0: 13, 1: 1, 2: 5})
    assert [t.first_rank for t in book.tables.values()] == [0, 1, 2]
    assert [book.used_pages(rank) for rank in range(3)] == [3, 2, 2]
    assert book.locate(0, 0, 13)[0].tolist() == [0] * 4 + [1] * 4 + [2] * 4 + [0]


def test_a_fork_costs_no_page_until_it_writes():
    book, first = PageBook.empty(1, page_size=4).add()
    book, _ = book.append({first: 6})
    book, fork = book.fork(first)
    assert book.used_pages(0) == 2
    book, copies = book.append({fork: 1})
    assert [(c.source, c.rows) for c in copies] == [(1, 2)]
    assert book.used_pages(0) == 3
    assert book.append({first: 1})[1] == ()  # the page is first's alone by now


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda book: book.table(7), "no sequence 7.*holds 0"),
        (lambda book: book.fork(7), "no sequence 7"),
        (lambda book: book.free(7), "no sequence 7"),
        (lambda book: book.append({0: 1, 7: 1}), "no sequence 7"),
        (lambda book: book.append({0: -1}), "truncate"),
        (lambda book: book.truncate(0, 6), "has 5 tokens.*not 6"),
        (lambda book: book.truncate(0, -1), "not -1"),
        (lambda book: book.append({0: 100}), r"rank 0 needs \d+ more pages of 2 tokens, and 4 of its 6 are free"),
        (lambda book: PageBook.empty(1, 0), "page_size=0"),
    ],
)
def test_errors_say_what_is_wrong(change, message):
    book, _ = PageBook.empty(2, page_size=2, capacity=6).add()
    book, _ = book.append({0: 5})
    with pytest.raises(ValueError, match=message):
        change(book)
