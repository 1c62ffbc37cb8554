"""Exported caches come back on any number of ranks; damaged and foreign files are refused and change nothing."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("safetensors")

import laga_attn as laga
from laga_attn.inference import LatentCache, export_cache, import_cache
from laga_attn.inference.storage import FP8
from tests.inference.test_cache import latents_of, new_cache
from tests.pool import RankContext


def parallel(ctx: RankContext) -> laga.ContextParallel:
    return laga.ContextParallel.none() if ctx.size == 1 else laga.ContextParallel(ctx.group)


def write(ctx: RankContext, folder: Path, **options) -> tuple[int, ...]:
    """Four sequences: 17 tokens, a fork of its first 10 that went on, an empty one, and one that is left out."""
    cache = new_cache(parallel(ctx), **options)
    first = cache.add()
    cache.append(first, latents_of(list(range(1, 18))))
    fork = cache.fork(first)
    cache.truncate(fork, 10)
    cache.append(fork, latents_of([50, 51]))
    empty, left_out = cache.add(), cache.add()
    cache.append(left_out, latents_of([99] * 5))
    export_cache(cache, folder, [first, empty, fork])
    return cache.memory().used


def read(ctx: RankContext, folder: Path, **options) -> tuple[list[list[torch.Tensor]], int]:
    cache = new_cache(parallel(ctx), **options)
    before = cache.add()
    cache.append(before, latents_of([7, 8]))
    ids = import_cache(cache, folder)
    cache.append(ids[2], latents_of([60]))
    return [[cache.read(s, layer, torch.float64) for layer in range(2)] for s in (before, *ids)], cache.memory().total


@pytest.mark.parametrize("target", [1, 2, 3])
@pytest.mark.parametrize("source", [1, 2, 4])
def test_caches_come_back_on_any_number_of_ranks(ranks, tmp_path, source, target):
    folder = tmp_path / "cache"
    ranks(source).run(write, folder)
    assert len(list(folder.iterdir())) == source
    contents = ([7, 8], list(range(1, 18)), [], [*range(1, 11), 50, 51, 60])
    page = 3 * 5 * 8 * 2
    for found, total in ranks(target).run(read, folder):
        for sequence, tokens in zip(found, contents, strict=True):
            for layer in range(2):
                assert torch.equal(sequence[layer], latents_of(tokens)[layer])
        # 1 page of its own, 6 of the first sequence; the fork shares 3 of those and added 2.
        assert total == 12 * page - 3 * page


@pytest.mark.skipif(FP8 is None, reason="this PyTorch has no float8_e4m3fn")
def test_fp8_rows_are_written_as_they_are(tmp_path):
    cache = LatentCache(2, 8, 4, dtype=FP8, page_size=2)
    sequence = cache.add()
    cache.append(sequence, torch.randn(2, 9, 12))
    other = LatentCache(2, 8, 4, dtype=FP8, page_size=2)
    (found,) = import_cache(other, export_cache(cache, tmp_path / "cache"))
    for layer in range(2):
        assert torch.equal(other.read(found, layer, torch.float32), cache.read(sequence, layer, torch.float32))


def write_little(ctx: RankContext, folder: Path) -> None:
    cache = new_cache(parallel(ctx))
    cache.append(cache.add(), latents_of([1, 2]))
    export_cache(cache, folder)


def read_little(ctx: RankContext, folder: Path) -> torch.Tensor:
    cache = new_cache(parallel(ctx))
    (sequence,) = import_cache(cache, folder)
    return cache.read(sequence, 1, torch.float64)


def test_ranks_without_a_page_write_and_read_empty_files(ranks, tmp_path):
    folder = tmp_path / "cache"
    ranks(3).run(write_little, folder)
    for found in ranks(2).run(read_little, folder):
        assert torch.equal(found, latents_of([1, 2])[1])


def test_a_file_holds_no_memory_that_is_nobodys(tmp_path):
    cache = new_cache()
    sequence = cache.add()
    cache.append(sequence, latents_of([1, 2, 3, 4]))
    cache.truncate(sequence, 1)
    export_cache(cache, tmp_path / "cache")
    from safetensors.torch import load_file

    rows = load_file(next((tmp_path / "cache").iterdir()))["layer.0"]
    assert torch.equal(rows[:1], latents_of([1])[0])
    assert not rows[1:].any()  # NaN, or the tokens that were forgotten, would show


def damage(folder: Path, how: str) -> None:
    path = sorted(folder.iterdir())[1]
    data = bytearray(path.read_bytes())
    if how == "flipped bit":
        data[-20] ^= 16
    elif how == "truncated":
        data = data[: len(data) // 2]
    elif how == "empty":
        data = bytearray()
    elif how == "not safetensors":
        data = bytearray(b"hello " * 100)
    elif how == "changed table":
        data = bytearray(bytes(data).replace(rb"\"length\": 17", rb"\"length\": 16"))
    elif how == "missing":
        path.unlink()
        return
    assert bytes(data) != path.read_bytes()
    path.write_bytes(bytes(data))


def import_damaged(ctx: RankContext, folder: Path, options: dict) -> None:
    cache = new_cache(parallel(ctx), **options)
    held = cache.add()
    cache.append(held, latents_of([1, 2, 3, 4]))
    book = cache.book
    try:
        import_cache(cache, folder)
    finally:
        assert cache.book is book
        assert torch.equal(cache.read(held, 0, torch.float64), latents_of([1, 2, 3, 4])[0])


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("flipped bit", "is damaged: its content does not match its digest"),
        ("truncated", "is damaged or not an exported cache"),
        ("empty", "is damaged or not an exported cache"),
        ("not safetensors", "is damaged or not an exported cache"),
        ("changed table", "does not belong to the same export|is damaged"),
        ("missing", "exported by 2 ranks, but holds rank-00000-of-00002"),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_damaged_files_are_refused_on_all_ranks(ranks, tmp_path, how, message, size):
    folder = tmp_path / "cache"
    ranks(2).run(write, folder)
    damage(folder, how)
    ranks(size).run_raises(import_damaged, folder, {}, match=message)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), cut=st.booleans())
def test_no_damage_goes_unnoticed(tmp_path, where, bit, cut):
    """Any bit flipped or any end cut off, in the tokens as in what the file says about itself."""
    folder = tmp_path / "cache"
    if not folder.exists():
        write(RankContext(0, 1, None), folder)  # type: ignore[arg-type]
        (tmp_path / "whole").write_bytes(next(folder.iterdir()).read_bytes())
    data = bytearray((tmp_path / "whole").read_bytes())
    place = int(where * len(data))
    if cut:
        data = data[:place]
    else:
        data[place] ^= 1 << bit
    next(folder.iterdir()).write_bytes(data)
    cache = new_cache()
    with pytest.raises(ValueError, match="rank-00000-of-00001"):
        import_cache(cache, folder)
    assert cache.sequences == ()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (rb"\"length\"", rb"\"lengte\""),
        (rb"\"pages\": [", rb"\"pages\": 7"),
        (rb"\"cp_size\": 1", rb"\"cp_size\": 9"),
        (rb"\"dtype\"", rb"\"dtypo\""),
        (b'"F64"', b'"I64"'),
    ],
)
def test_damage_that_only_one_rank_looks_for_is_an_error_on_all(ranks, tmp_path, old, new):
    folder = tmp_path / "cache"
    ranks(1).run(write, folder)
    path = next(folder.iterdir())
    whole = path.read_bytes()
    assert old in whole
    path.write_bytes(whole.replace(old, new))
    ranks(3).run_raises(import_damaged, folder, {}, match="rank-00000-of-00001|exported by 9 ranks")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "another"}, "holds a cache with model 'mine', but this one has model 'another'"),
        ({"model": "mine", "dtype": torch.float32}, "dtype 'torch.float64', but this one has dtype 'torch.float32'"),
        ({"model": "mine", "page_size": 4}, "page_size 3"),
        ({"model": "mine", "max_tokens": 12}, "the cache is full"),
    ],
)
def test_files_of_another_model_or_kind_are_refused(ranks, tmp_path, options, message):
    folder = tmp_path / "cache"
    ranks(1).run(write_as, folder, "mine")
    ranks(2).run_raises(import_damaged, folder, options, match=re.escape(message))


def write_as(ctx: RankContext, folder: Path, model: str) -> None:
    write(ctx, folder, model=model)


def test_other_sizes_are_another_model(tmp_path):
    cache = new_cache()
    cache.append(cache.add(), latents_of([1]))
    folder = export_cache(cache, tmp_path / "cache")
    with pytest.raises(ValueError, match="kv_lora_rank 3, but this one has kv_lora_rank 4"):
        import_cache(LatentCache(2, 4, 2, dtype=torch.float64, page_size=3), folder)
    with pytest.raises(ValueError, match="num_layers 2, but this one has num_layers 3"):
        import_cache(LatentCache(3, 3, 2, dtype=torch.float64, page_size=3), folder)


def test_nothing_is_overwritten_and_unknown_sequences_are_refused(tmp_path):
    cache = new_cache()
    cache.append(cache.add(), latents_of([1]))
    export_cache(cache, tmp_path / "cache")
    with pytest.raises(ValueError, match="not an empty folder"):
        export_cache(cache, tmp_path / "cache")
    with pytest.raises(ValueError, match=r"no sequences \[4\]"):
        export_cache(cache, tmp_path / "other", [0, 4])
    assert not (tmp_path / "other").exists()
    with pytest.raises(ValueError, match="holds no exported cache"):
        import_cache(cache, tmp_path / "nowhere")


def export_elsewhere(ctx: RankContext, folder: Path) -> None:
    write(ctx, folder / str(ctx.rank))


def test_ranks_that_export_to_different_folders_are_refused(ranks, tmp_path):
    ranks(2).run_raises(export_elsewhere, tmp_path, match="ranks disagree: folder")
    assert not any(tmp_path.iterdir())


def export_with_a_full_disk(ctx: RankContext, folder: Path) -> None:
    from laga_attn.inference import files

    def full(*args: object) -> None:
        raise OSError("no space left")

    whole = files.os.replace
    if ctx.rank == 1:
        files.os.replace = full
    try:
        write(ctx, folder)
    finally:
        files.os.replace = whole


def test_a_rank_that_cannot_write_is_an_error_on_all_and_leaves_no_file(ranks, tmp_path):
    folder = tmp_path / "cache"
    ranks(3).run_raises(export_with_a_full_disk, folder, match=r"rank 1: .*rank-00001.* cannot be written \(no space")
    assert not list(folder.iterdir())
    ranks(3).run(write, folder)  # and the folder can be used


def test_metadata_is_readable(tmp_path):
    from safetensors import safe_open

    cache = new_cache(model="m")
    cache.append(cache.add(), latents_of([1, 2, 3, 4]))
    path = next(export_cache(cache, tmp_path / "cache").iterdir())
    with safe_open(path, "pt") as file:
        about = json.loads(file.metadata()["laga_attn_cache"])
    assert about["tables"] == [{"length": 4, "first_rank": 0, "pages": [0, 1]}]
    assert about["model"] == "m"
