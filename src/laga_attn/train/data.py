"""Text files as an endless, repeatable stream of packed token rows.

A token is a byte; every document starts with `DOCUMENT_START`. Documents follow each other in an order that
only the seed and the epoch decide, and are cut into rows of equal length. A `Position` says where the stream
stands, so a stream opened at a saved position continues exactly.
"""

from __future__ import annotations

import glob
import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from laga_attn.train.errors import UsageError

__all__ = ["DOCUMENT_START", "VOCAB_SIZE", "Corpus", "Position", "Row", "find_files", "open_corpus", "stream"]

DOCUMENT_START = 256
VOCAB_SIZE = 257

# Not text that anybody wrote: caches, version control, other people's packages inside the standard library.
_SKIPPED_FOLDERS = frozenset({"__pycache__", "site-packages", "dist-packages", "node_modules"})


@dataclass(frozen=True, slots=True)
class Position:
    """Where a stream stands: `token` tokens of the `document`-th document of `epoch` have been read."""

    epoch: int = 0
    document: int = 0
    token: int = 0


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence: `tokens` `[seq_len]` int64, and the offsets `[n + 1]` of the document pieces in it."""

    tokens: NDArray[np.int64]
    cu_seqlens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Corpus:
    """The documents of a run: files and their sizes in bytes, in a fixed order, and the seed of the shuffle."""

    paths: tuple[Path, ...]
    sizes: tuple[int, ...]
    seed: int

    @property
    def fingerprint(self) -> str:
        """Equal for corpora whose streams are equal: names, sizes and order of the files, and the seed."""
        names = [path.name for path in self.paths]
        text = repr((self.seed, names, self.sizes))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def read(self, index: int, start: int, count: int) -> NDArray[np.int64]:
        """Tokens `start` .. `start + count` of document `index`; token 0 is `DOCUMENT_START`.

        Raises:
            UsageError: the file is gone or shorter than it was.
        """
        skip = int(start == 0)
        try:
            with self.paths[index].open("rb") as file:
                file.seek(max(0, start - 1))
                content = file.read(count - skip)
        except OSError as error:
            raise UsageError(f"cannot read {self.paths[index]}: {error.strerror}") from error
        if len(content) != count - skip:
            raise UsageError(
                f"{self.paths[index]} had {self.sizes[index]} bytes when the run began and is shorter now; "
                "training data must not change during a run"
            )
        tokens = np.frombuffer(content, dtype=np.uint8).astype(np.int64)
        return np.concatenate([[DOCUMENT_START], tokens]) if skip else tokens


def find_files(patterns: Sequence[str]) -> tuple[Path, ...]:
    """The files that `patterns` (files, folders, globs) name, each once, in an order of their own names.

    Folders are searched through, hidden files and caches left out. No pattern at all means the Python source
    of the standard library.

    Raises:
        UsageError: a pattern that matches no file.
    """
    if not patterns:
        return tuple(path for path in _walk(Path(sysconfig.get_paths()["stdlib"])) if path.suffix == ".py")
    found: dict[Path, None] = {}
    for pattern in patterns:
        matches = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
        files = [file for path in map(Path, matches) for file in (_walk(path) if path.is_dir() else [path])]
        if not files:
            raise UsageError(
                f"--data {pattern} matches no file; give files, folders or quoted globs like 'src/**/*.py'"
            )
        found.update(dict.fromkeys(files))
    return tuple(found)


def open_corpus(patterns: Sequence[str], seed: int) -> Corpus:
    """The non-empty files that `patterns` name, see `find_files`.

    Raises:
        UsageError: no file, or only empty ones.
    """
    sized = [(path, path.stat().st_size) for path in find_files(patterns)]
    kept = [(path, size) for path, size in sized if size]
    if not kept:
        raise UsageError(f"--data {' '.join(patterns)}: all {len(sized)} files are empty")
    return Corpus(tuple(path for path, _ in kept), tuple(size for _, size in kept), seed)


def stream(corpus: Corpus, seq_len: int, start: Position | None = None) -> Iterator[tuple[Row, Position]]:
    """Endless rows of `seq_len` tokens, each with the position after it.

    Rows are filled to the last token: a document that does not fit goes on as a new piece in the next row.
    """
    position = start or Position()
    while True:
        pieces: list[NDArray[np.int64]] = []
        offsets = [0]
        while offsets[-1] < seq_len:
            order = _order(corpus.seed, position.epoch, len(corpus.paths))
            index = order[position.document]
            length = corpus.sizes[index] + 1
            count = min(seq_len - offsets[-1], length - position.token)
            pieces.append(corpus.read(index, position.token, count))
            offsets.append(offsets[-1] + count)
            position = _advance(position, count, length, len(order))
        yield Row(np.concatenate(pieces), tuple(offsets)), position


def _advance(position: Position, count: int, length: int, documents: int) -> Position:
    if position.token + count < length:
        return Position(position.epoch, position.document, position.token + count)
    if position.document + 1 < documents:
        return Position(position.epoch, position.document + 1, 0)
    return Position(position.epoch + 1, 0, 0)


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, documents: int) -> tuple[int, ...]:
    """A permutation by hashes: unlike a random generator's, the same in every release of every library."""

    def key(index: int) -> bytes:
        return hashlib.blake2b(f"{seed} {epoch} {index}".encode(), digest_size=16).digest()

    return tuple(sorted(range(documents), key=key))


def _walk(folder: Path) -> Iterator[Path]:
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED_FOLDERS and name[0] != ".")
        for path in (Path(parent, name) for name in sorted(files) if name[0] != "."):
            if path.is_file():
                yield path
