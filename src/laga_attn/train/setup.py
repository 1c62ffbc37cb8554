"""Everything about a run that can be wrong, looked at before anything is built or written."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from laga_attn.train.data import Corpus, open_corpus
from laga_attn.train.errors import UsageError
from laga_attn.train.model import ModelSource, check, find_model
from laga_attn.train.options import Ranks, TrainOptions, arrange

__all__ = ["Run", "checkpoints", "examine"]

_NEEDED = ("transformers", "safetensors", "matplotlib")


@dataclass(frozen=True, slots=True)
class Run:
    """A run that has been found possible."""

    options: TrainOptions
    ranks: Ranks
    model: ModelSource
    corpus: Corpus


def examine(options: TrainOptions, world: int, *, restarted: bool = False) -> Run:
    """Check a run over `world` processes and find its model and data. Writes nothing.

    Args:
        options: what is asked.
        world: number of processes.
        restarted: the same run has been started before by the launcher, so its folder may exist.

    Raises:
        UsageError: whatever stands in the way.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"training needs {', '.join(missing)}; run: pip install 'laga-attn[train]'")
    ranks = arrange(options, world)
    _check_folders(options, restarted)
    source = find_model(options.model)
    check(source.config, options, ranks)
    return Run(options, ranks, source, open_corpus(options.data, options.seed))


def checkpoints(out: Path) -> Path:
    """Where a run in `out` keeps its checkpoints."""
    return out / "checkpoints"


def _check_folders(options: TrainOptions, restarted: bool) -> None:
    out = options.out
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out} is a file; choose a folder")
    if options.resume and not restarted and not any(checkpoints(out).glob("step-*")):
        raise UsageError(f"--resume: there is no checkpoint in {checkpoints(out)}; start without --resume")
    if not options.resume and not restarted and out.is_dir() and any(out.iterdir()):
        raise UsageError(f"--out {out} already holds a run; continue it with --resume or choose another")
    export = options.export
    if export is not None and export.exists() and (not export.is_dir() or any(export.iterdir())):
        raise UsageError(f"--export {export} exists and is not an empty folder; choose another")
