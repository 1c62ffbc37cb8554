"""Caches as files: one safetensors file per rank, readable by any number of ranks.

A file holds the pages that its rank has of the exported sequences, `layer.0`, `layer.1`, ... of shape
`[pages * page_size, row_width]`, and in its metadata what the cache is, the page tables of all sequences (with page
numbers counted inside the files), and a digest over all of that.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from laga_attn.agreement import agree
from laga_attn.inference.cache import LatentCache
from laga_attn.inference.pages import PageBook, PageMove, PageTable

__all__ = ["export_cache", "import_cache"]

_FORMAT = 1
_KEY = "laga_attn_cache"
_IDENTITY = ("model", "num_layers", "kv_lora_rank", "qk_rope_head_dim", "dtype", "page_size")


def export_cache(cache: LatentCache, folder: Path | str, sequences: Sequence[int] | None = None) -> Path:
    """Write sequences of a cache to a folder, every rank its own file. Collective.

    Args:
        cache: what to write from.
        folder: new or empty, on a file system that all ranks see.
        sequences: which, in this order; None: all.

    Returns:
        The folder.

    Raises:
        ValueError: an unknown sequence, a folder that is not empty, ranks that disagree, or a rank that cannot write:
            on every rank, and no file is left.
    """
    _safetensors()
    folder, book, rank = Path(folder), cache.book, cache.cp.rank
    chosen = list(cache.sequences if sequences is None else sequences)
    error = None
    if missing := [sequence for sequence in chosen if sequence not in book.tables]:
        error = f"the cache has no sequences {missing}; it has {list(cache.sequences)}"
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        error = f"{folder} exists and is not an empty folder; choose another"
    agree(cache.cp, {"folder": str(folder), "sequences": chosen, "pages in use": _pages_in_use(cache)}, error)

    tables, pages = _numbered_inside_files(book, chosen)
    unused = _unused_rows(cache, chosen, pages[rank])
    tensors = {
        name: cache.store.read(layer, np.asarray(pages[rank], dtype=np.int64)).to("cpu", copy=True)
        for layer, name in enumerate(_layer_names(cache))
    }
    for rows in tensors.values():
        rows[unused] = 0  # what memory happened to hold is nobody's
    about = {
        "format": _FORMAT, **_identity(cache), "cp_size": cache.cp.size, "rank": rank,
        "tables": [asdict(table) for table in tables],
    }  # fmt: skip
    about["digest"] = _digest(about, tensors.values())
    target = folder / _file_name(rank, cache.cp.size)
    try:
        _write(target, tensors, about)
    except (OSError, _safetensors().SafetensorError) as failure:
        error = f"{target} cannot be written ({failure})"
    try:
        agree(cache.cp, {"exported to": str(folder)}, error)
    except ValueError:
        target.unlink(missing_ok=True)
        raise
    return folder


def import_cache(cache: LatentCache, folder: Path | str) -> tuple[int, ...]:
    """Add the sequences of an exported cache. Collective; the number of ranks may be another than at export.

    Returns:
        The new ids, in the order of export.

    Raises:
        ValueError: files that are missing, damaged or of another model or kind of cache, too little room, or ranks
            that disagree: the same error on all ranks, and the cache is as it was.
    """
    _safetensors()
    found = _Found((), 0, ())
    error = None
    try:
        found = _examine(cache, Path(folder))
    except (ValueError, OSError) as failure:
        error = str(failure)
    agree(cache.cp, {"folder": str(folder)}, error)
    book, ids, moves = cache.book, tuple[int, ...](), tuple[PageMove, ...]()
    try:
        book, ids, moves = cache.book.adopt(found.tables, found.cp_size)
    except ValueError as failure:
        error = str(failure)
    agree(cache.cp, {"tables in the files": found.tables, "pages in use": _pages_in_use(cache)}, error)

    cache.store.reserve(book.ranks[cache.cp.rank].made)
    size = cache.page_size
    for source, path in enumerate(found.paths):
        mine = [move for move in moves if move.source_rank == source and move.rank == cache.cp.rank]
        if not mine:
            continue
        places = torch.arange(size)
        read = torch.cat([places + move.source * size for move in mine])
        write = torch.cat([places + move.target * size for move in mine])
        with _safetensors().safe_open(path, "pt") as file:
            for layer, name in enumerate(_layer_names(cache)):
                cache.store.write(layer, write, file.get_tensor(name)[read])
    cache.replace_book(cache.book, book)
    return ids


def _write(target: Path, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
    """A whole file, or none."""
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_suffix(".unfinished")
    try:
        _safetensors().torch.save_file(tensors, unfinished, metadata={_KEY: json.dumps(about)})
        os.replace(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class _Found:
    """The files of an exported cache, in rank order, and the tables that they share."""

    paths: tuple[Path, ...]
    cp_size: int
    tables: tuple[PageTable, ...]


def _examine(cache: LatentCache, folder: Path) -> _Found:
    """Find the files, compare them with the cache and with each other, and look for damage.

    Every rank reads the metadata of all files and the content of its share of them.

    Raises:
        ValueError: what is wrong with which file.
    """
    paths = sorted(folder.glob("rank-*-of-*.safetensors"))
    if not paths:
        raise ValueError(f"{folder} holds no exported cache (files rank-00000-of-... .safetensors)")
    abouts = [_about(path) for path in paths]
    cp_size = abouts[0]["cp_size"]
    if len(paths) != cp_size or any(path.name != _file_name(rank, cp_size) for rank, path in enumerate(paths)):
        raise ValueError(
            f"{folder} was exported by {cp_size} ranks, but holds {', '.join(path.name for path in paths)}; "
            "it needs the file of every rank and no other"
        )
    for rank, (path, about) in enumerate(zip(paths, abouts, strict=True)):
        for name, expected in {"format": _FORMAT, **_identity(cache)}.items():
            if about[name] != expected:
                raise ValueError(
                    f"{path} holds a cache with {name} {about[name]!r}, but this one has {name} {expected!r}; latents "
                    "fit the model that computed them, and a cache of the same kind"
                )
        if about["rank"] != rank or any(about[name] != abouts[0][name] for name in ("cp_size", "tables")):
            raise ValueError(f"{path} does not belong to the same export as {paths[0]}")
        if rank % cache.cp.size == cache.cp.rank:
            _check_content(cache, path, about)
    return _Found(tuple(paths), cp_size, _tables(abouts[0]))


def _about(path: Path) -> dict[str, Any]:
    """The metadata of a file, with all that is expected in it.

    Raises:
        ValueError: not a file of an exported cache, or damaged so that it cannot be read.
    """
    try:
        with _safetensors().safe_open(path, "pt") as file:
            about: dict[str, Any] = json.loads((file.metadata() or {})[_KEY])
        missing = {"format", *_IDENTITY, "cp_size", "rank", "digest"} - about.keys()
        if missing:
            raise KeyError(", ".join(sorted(missing)))
        _tables(about)
    except (OSError, LookupError, TypeError, AttributeError, ValueError, _safetensors().SafetensorError) as error:
        raise ValueError(
            f"{path} is damaged or not an exported cache ({type(error).__name__}: {error}); export it again"
        ) from error
    return about


def _tables(about: dict[str, Any]) -> tuple[PageTable, ...]:
    return tuple(PageTable(t["length"], t["first_rank"], tuple(t["pages"])) for t in about["tables"])


def _check_content(cache: LatentCache, path: Path, about: dict[str, Any]) -> None:
    stated = {name: value for name, value in about.items() if name != "digest"}
    try:
        with _safetensors().safe_open(path, "pt") as file:
            intact = about["digest"] == _digest(stated, map(file.get_tensor, _layer_names(cache)))
    except _safetensors().SafetensorError:
        intact = False
    if not intact:
        raise ValueError(f"{path} is damaged: its content does not match its digest; export it again")


def _identity(cache: LatentCache) -> dict[str, Any]:
    """What two caches must have in common for latents of one to be latents of the other."""
    codec = cache.codec
    values = (
        cache.model, cache.num_layers, codec.kv_lora_rank, codec.qk_rope_head_dim, str(codec.dtype), cache.page_size
    )  # fmt: skip
    return dict(zip(_IDENTITY, values, strict=True))


def _numbered_inside_files(book: PageBook, sequences: Sequence[int]) -> tuple[list[PageTable], list[list[int]]]:
    """The tables with pages renumbered in order of use on each rank, and each rank's pages in that order."""
    numbers: list[dict[int, int]] = [{} for _ in range(book.cp_size)]
    tables = []
    for table in map(book.table, sequences):
        ranks = [(table.first_rank + place) % book.cp_size for place in range(len(table.pages))]
        pages = [numbers[r].setdefault(page, len(numbers[r])) for r, page in zip(ranks, table.pages, strict=True)]
        tables.append(PageTable(table.length, table.first_rank, tuple(pages)))
    return tables, [list(known) for known in numbers]


def _unused_rows(cache: LatentCache, sequences: Sequence[int], pages: list[int]) -> Tensor:
    """`[len(pages) * page_size]` bool: the rows of this rank's pages that hold no token of these sequences."""
    size, book, rank = cache.page_size, cache.book, cache.cp.rank
    filled = dict.fromkeys(pages, 0)
    for sequence in sequences:
        count = book.local_count(sequence, rank, book.table(sequence).length)
        for number, page in enumerate(book.local_pages(sequence, rank).tolist()):
            filled[page] = max(filled[page], min(size, count - number * size))
    counts = torch.tensor(list(filled.values()), dtype=torch.int64)
    return (torch.arange(size) >= counts[:, None]).flatten()


def _pages_in_use(cache: LatentCache) -> tuple[int, ...]:
    return tuple(cache.book.used_pages(rank) for rank in range(cache.cp.size))


def _layer_names(cache: LatentCache) -> list[str]:
    return [f"layer.{layer}" for layer in range(cache.num_layers)]


def _file_name(rank: int, cp_size: int) -> str:
    return f"rank-{rank:05d}-of-{cp_size:05d}.safetensors"


def _digest(about: dict[str, Any], tensors: Iterable[Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _safetensors() -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise ImportError("files of caches need safetensors: pip install 'laga-attn[train]'") from error
    return safetensors
