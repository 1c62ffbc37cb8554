"""Checkpoints that a kill at any moment cannot spoil.

A checkpoint is written into a folder beside its place and renamed into it once everything has reached the
disk. Its manifest lists every file with a digest, so a reader can tell a whole checkpoint from a damaged one.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

from laga_attn.train.data import Position
from laga_attn.train.errors import UsageError
from laga_attn.train.together import on_first_rank, same_everywhere

__all__ = ["Manifest", "find_newest", "load", "save"]

_MANIFEST = "manifest.json"
_PREFIX = "step-"
_UNFINISHED = ".unfinished-"


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint is: everything to continue from but the tensors.

    Attributes:
        step: optimizer steps done.
        position: where the data stream stands.
        corpus: fingerprint of the corpus that the position belongs to.
        model: digest of the names and shapes of the parameters.
        files: digest of each file of the checkpoint by its name.
    """

    step: int
    position: Position
    corpus: str
    model: str
    files: dict[str, str]

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The manifest of a checkpoint folder, its files compared with it.

        Raises:
            ValueError: what is missing or damaged.
        """
        try:
            fields = json.loads((folder / _MANIFEST).read_text())
            fields["position"] = Position(**fields["position"])
            manifest = cls(**fields)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ValueError(f"its {_MANIFEST} cannot be read ({error})") from error
        for name, digest in manifest.files.items():
            path = folder / name
            if not path.is_file():
                raise ValueError(f"its file {name} is missing")
            if _digest(path) != digest:
                raise ValueError(f"its file {name} is damaged")
        return manifest


def save(
    root: Path,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    step: int,
    position: Position,
    corpus: str,
    keep: int,
) -> Path:
    """Write the checkpoint of `step` under `root` and remove all but the `keep` newest. All ranks call this.

    Weights and optimizer state are the same on every rank; each tensor is written once, by one of them.

    Raises:
        RuntimeError: the weights of the ranks differ, so there is no one state to write.
    """
    if not same_everywhere(_weights_digest(model)):
        raise RuntimeError(
            f"the weights of the ranks differ after step {step}; nothing was saved. Every rank must apply the "
            "same summed gradient to the same weights"
        )
    target, unfinished = root / f"{_PREFIX}{step:08d}", root / f"{_UNFINISHED}{step:08d}"

    def prepare() -> None:
        root.mkdir(parents=True, exist_ok=True)
        for leftover in root.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(leftover)
        unfinished.mkdir()

    def commit() -> None:
        files = {path.name: _digest(path) for path in sorted(unfinished.iterdir())}
        manifest = Manifest(step, position, corpus, _shapes_digest(model), files)
        _write_durably(unfinished / _MANIFEST, json.dumps(asdict(manifest), indent=1))
        _sync_folder(unfinished)
        if target.exists():  # damaged, or the resumed run would not be here again
            target.rename(root / f"{_UNFINISHED}replaced-{step:08d}")
        unfinished.rename(target)
        _sync_folder(root)
        _prune(root, step, keep)

    on_first_rank(prepare)
    state_dict_saver.save(_state(model, optimizer), checkpoint_id=unfinished)
    on_first_rank(commit)
    return target


def find_newest(root: Path, warn: Callable[[str], None]) -> tuple[Path, Manifest] | None:
    """The newest whole checkpoint under `root`, or None; `warn` hears of every one passed over."""
    for folder in sorted(root.glob(f"{_PREFIX}*"), reverse=True):
        try:
            return folder, Manifest.read(folder)
        except ValueError as error:
            warn(f"skipping checkpoint {folder}: {error}")
    return None


def load(folder: Path, manifest: Manifest, model: nn.Module, optimizer: Optimizer) -> None:
    """Put a checkpoint's tensors into `model` and `optimizer`. All ranks call this; each reads everything.

    Raises:
        UsageError: the checkpoint belongs to a model with other parameters.
    """
    if manifest.model != _shapes_digest(model):
        raise UsageError(
            f"checkpoint {folder} belongs to a model with other parameters; resume with the --model that began the run"
        )
    state = _state(model, optimizer)
    state_dict_loader.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def _state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


def _prune(root: Path, step: int, keep: int) -> None:
    # Only up to this step: damaged checkpoints of later steps, passed over on resume, must not push out good
    # ones.
    done = [folder for folder in sorted(root.glob(f"{_PREFIX}*")) if folder.name <= f"{_PREFIX}{step:08d}"]
    for folder in [*done[:-keep], *root.glob(f"{_UNFINISHED}*")]:
        shutil.rmtree(folder)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _shapes_digest(model: nn.Module) -> str:
    text = repr(sorted((name, tuple(value.shape)) for name, value in model.state_dict().items()))
    return hashlib.sha256(text.encode()).hexdigest()


def _weights_digest(model: nn.Module) -> bytes:
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().float().cpu().contiguous().numpy().data)
    return digest.digest()


def _write_durably(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
