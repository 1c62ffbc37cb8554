from __future__ import annotations

import sysconfig
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from laga_attn.train.data import DOCUMENT_START, Corpus, Position, find_files, open_corpus, stream
from laga_attn.train.errors import UsageError

documents = st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=6)
seq_lens = st.integers(2, 33)
repeated = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def corpus_of(folder: Path, contents: list[bytes], seed: int = 0) -> Corpus:
    for old in folder.iterdir():
        old.unlink()
    for number, content in enumerate(contents):
        (folder / f"{number:03d}").write_bytes(content)
    return open_corpus([str(folder)], seed)


def read_epoch(corpus: Corpus, seq_len: int) -> list[list[int]]:
    """The documents of the first epoch, put together again from the pieces that the rows say they hold."""
    found: list[list[int]] = []
    for row, position in stream(corpus, seq_len):
        assert row.tokens.shape == (seq_len,)
        assert row.cu_seqlens[0] == 0
        assert row.cu_seqlens[-1] == seq_len
        for begin, end in zip(row.cu_seqlens, row.cu_seqlens[1:], strict=False):
            assert begin < end
            piece = row.tokens[begin:end].tolist()
            assert DOCUMENT_START not in piece[1:], "a document starts in the middle of a piece"
            if piece[0] == DOCUMENT_START:
                found.append([])
            found[-1] += piece
        if position.epoch > 0:
            break
    return found[: len(corpus.paths)]


@repeated
@given(contents=documents, seq_len=seq_lens, seed=st.integers(0, 3))
def test_every_byte_of_every_document_comes_once_and_in_order(tmp_path, contents, seq_len, seed):
    found = read_epoch(corpus_of(tmp_path, contents, seed), seq_len)
    assert sorted(found) == sorted([DOCUMENT_START, *content] for content in contents)


@repeated
@given(contents=documents, seq_len=seq_lens, read=st.integers(0, 12))
def test_a_stream_opened_at_a_position_continues_exactly(tmp_path, contents, seq_len, read):
    corpus = corpus_of(tmp_path, contents)
    rows = list(islice(stream(corpus, seq_len), read + 5))
    start = rows[read - 1][1] if read else Position()
    for (row, position), (again, again_position) in zip(
        rows[read:], islice(stream(corpus, seq_len, start), 5), strict=True
    ):
        np.testing.assert_array_equal(row.tokens, again.tokens)
        assert row.cu_seqlens == again.cu_seqlens
        assert position == again_position


def test_the_order_depends_on_seed_and_epoch_alone(tmp_path):
    contents = [bytes([65 + number]) for number in range(20)]
    orders = {}
    for seed in (0, 1):
        tokens = [row.tokens[1] for row, _ in islice(stream(corpus_of(tmp_path, contents, seed), 2), 40)]
        orders[seed, 0], orders[seed, 1] = tokens[:20], tokens[20:]
        assert sorted(orders[seed, 0]) == sorted(orders[seed, 1]) == list(range(65, 85))
    assert len({tuple(order) for order in orders.values()}) == 4
    assert orders[0, 0] == [row.tokens[1] for row, _ in islice(stream(corpus_of(tmp_path, contents), 2), 20)]


def test_a_document_longer_than_a_row_goes_on_in_the_next(tmp_path):
    corpus = corpus_of(tmp_path, [b"abcdefg"])
    rows = [row for row, _ in islice(stream(corpus, 5), 3)]
    assert [row.cu_seqlens for row in rows] == [(0, 5), (0, 3, 5), (0, 5)]
    assert rows[0].tokens.tolist() == [DOCUMENT_START, *b"abcd"]
    assert rows[1].tokens.tolist() == [*b"efg", DOCUMENT_START, *b"a"]


def test_files_folders_and_globs_name_each_file_once_whatever_their_order_on_disk(tmp_path):
    for name in ("b/2.txt", "b/1.txt", "a.txt", "b/c/3.md", ".hidden", "b/__pycache__/x.pyc", ".git/config"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    names = [str(path.relative_to(tmp_path)) for path in find_files([str(tmp_path)])]
    assert names == ["a.txt", "b/1.txt", "b/2.txt", "b/c/3.md"]
    again = find_files([f"{tmp_path}/**/*.txt", f"{tmp_path}/b", f"{tmp_path}/a.txt"])
    assert [str(path.relative_to(tmp_path)) for path in again] == ["a.txt", "b/1.txt", "b/2.txt", "b/c/3.md"]


def test_without_data_the_standard_library_is_read():
    files = find_files([])
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    assert stdlib / "argparse.py" in files
    assert all(path.suffix == ".py" and "site-packages" not in path.parts for path in files)


def test_a_pattern_without_files_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"nothing-here.*matches no file"):
        open_corpus([f"{tmp_path}/nothing-here*"], 0)
    (tmp_path / "empty").touch()
    with pytest.raises(UsageError, match="all 1 files are empty"):
        open_corpus([str(tmp_path)], 0)


def test_empty_files_are_left_out(tmp_path):
    assert [path.name for path in corpus_of(tmp_path, [b"", b"x", b""]).paths] == ["001"]


def test_a_file_that_shrinks_during_a_run_is_reported(tmp_path):
    corpus = corpus_of(tmp_path, [b"0123456789"])
    (tmp_path / "000").write_bytes(b"01")
    with pytest.raises(UsageError, match="had 10 bytes"):
        next(stream(corpus, 8))
    (tmp_path / "000").unlink()
    with pytest.raises(UsageError, match="cannot read"):
        next(stream(corpus, 8))


def test_the_fingerprint_tells_streams_apart(tmp_path):
    corpus = corpus_of(tmp_path, [b"ab", b"c"])
    assert corpus.fingerprint == corpus_of(tmp_path, [b"xy", b"c"]).fingerprint  # names, sizes, seed
    others = [corpus_of(tmp_path, [b"ab", b"cd"]), corpus_of(tmp_path, [b"ab"]), corpus_of(tmp_path, [b"ab", b"c"], 1)]
    assert len({corpus.fingerprint, *(other.fingerprint for other in others)}) == 4
