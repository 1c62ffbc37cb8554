"""Random operations on caches, and a plain model of what they must do: lists of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import strategies as st

__all__ = ["Lists", "Operation", "operations"]

Operation = tuple[str, int, int]  # name, which sequence (modulo how many there are), how much


def operations(most: int = 30, tokens: int = 12) -> st.SearchStrategy[list[Operation]]:
    """Sequences of operations; appends are the most frequent."""
    names = st.sampled_from(["add", "append", "append", "append", "truncate", "fork", "free"])
    return st.lists(st.tuples(names, st.integers(0, 99), st.integers(0, tokens)), min_size=1, max_size=most)


@dataclass
class Lists:
    """Sequences as lists of tokens, where every token ever appended is a new number."""

    sequences: dict[int, list[int]] = field(default_factory=dict)
    next_id: int = 0
    next_token: int = 1

    def pick(self, which: int) -> int | None:
        ids = list(self.sequences)
        return ids[which % len(ids)] if ids else None

    def fresh(self, count: int) -> list[int]:
        tokens = list(range(self.next_token, self.next_token + count))
        self.next_token += count
        return tokens

    def add(self, content: Sequence[int] = ()) -> int:
        self.sequences[self.next_id] = list(content)
        self.next_id += 1
        return self.next_id - 1
