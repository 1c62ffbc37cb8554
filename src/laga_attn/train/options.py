"""What a training run is asked to do, and the rules that do not need a model or a process group to check."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from laga_attn.attention_plan import SAVE_POLICIES, SCHEMES
from laga_attn.train.errors import UsageError

__all__ = ["Device", "Dtype", "Ranks", "Save", "Scheme", "TrainOptions", "arrange", "learning_rate"]

Scheme: TypeAlias = Literal["laga", "explicit", "absorbed", "auto"]
Save: TypeAlias = Literal["latent", "gathered", "kv", "auto"]
Dtype: TypeAlias = Literal["bf16", "fp32"]
Device: TypeAlias = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """One training run.

    Attributes:
        model: a preset's name, a Hugging Face config file, or a local Hugging Face checkpoint directory.
        data: files, folders and globs to read as bytes; empty: the source of Python's standard library.
        out: folder of the run (checkpoints, metrics.jsonl, loss.png).
        export: folder for a Hugging Face checkpoint at the end, or None.
        steps: optimizer steps of the whole run, those before a resume included.
        seq_len: tokens per sequence.
        batch_size: sequences per data-parallel rank and step; each is one forward and backward pass.
        cp: ranks that share a sequence; None: all.
        ulysses_degree: ranks that exchange heads; None: 1, or free to choose where scheme is `auto`.
        scheme, save: as in `laga_attn.latent_attention`.
        dtype: `bf16` keeps fp32 weights and computes under autocast.
        activation_checkpointing: recompute each layer in backward.
        lr, min_lr, warmup: peak and final learning rate of the cosine, and steps of linear warm-up.
        weight_decay, clip: AdamW's decay, and the bound on the norm of the whole gradient (0: no clipping).
        seed: of the initial weights and the order of the documents.
        save_every, keep: steps between checkpoints, and how many of the newest to keep.
        resume: continue from the newest complete checkpoint in `out`.
        timeout: seconds after which a rank gives up waiting for another.
        device: where to compute; `auto` takes CUDA if there is any.

    Raises:
        UsageError: a value outside its range.
    """

    model: str = "tiny"
    data: tuple[str, ...] = ()
    out: Path = Path("runs/tiny")
    export: Path | None = None
    steps: int = 200
    seq_len: int = 4096
    batch_size: int = 1
    cp: int | None = None
    ulysses_degree: int | None = None
    scheme: Scheme = "laga"
    save: Save = "auto"
    dtype: Dtype = "fp32"
    activation_checkpointing: bool = False
    lr: float = 1e-3
    min_lr: float = 1e-4
    warmup: int = 20
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0
    save_every: int = 50
    keep: int = 2
    resume: bool = False
    timeout: float = 600.0
    device: Device = "auto"

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and not (value >= least and math.isfinite(value)):
                raise UsageError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")
        for name, choices in (("scheme", Scheme), ("save", Save), ("dtype", Dtype), ("device", Device)):
            value = getattr(self, name)
            if value not in get_args(choices):
                raise UsageError(f"--{name} must be one of {', '.join(get_args(choices))}, got {value!r}")
        policies = ("auto", *_save_policies(self.scheme))
        if self.save not in policies:
            raise UsageError(
                f"--save {self.save} is not possible with --scheme {self.scheme}; choose one of {', '.join(policies)}"
            )
        for name in ("lr", "timeout"):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise UsageError(f"--{name} must be above 0, got {value}")


_LEAST = {
    "steps": 1,
    "seq_len": 2,
    "batch_size": 1,
    "cp": 1,
    "ulysses_degree": 1,
    "min_lr": 0,
    "warmup": 0,
    "weight_decay": 0,
    "clip": 0,
    "seed": 0,
    "save_every": 1,
    "keep": 1,
}


@dataclass(frozen=True, slots=True)
class Ranks:
    """How the processes of a run divide the work: `data_parallel * context_parallel` of them."""

    data_parallel: int
    context_parallel: int

    @property
    def world(self) -> int:
        """All processes."""
        return self.data_parallel * self.context_parallel

    def place(self, rank: int) -> tuple[int, int]:
        """`(data-parallel rank, context-parallel rank)`: consecutive ranks share a sequence."""
        return divmod(rank, self.context_parallel)


def arrange(options: TrainOptions, world: int) -> Ranks:
    """Divide `world` processes into data-parallel replicas of context-parallel groups.

    Raises:
        UsageError: `cp` does not divide the processes, `ulysses_degree` does not divide `cp`, or the sequence
            is too short to be shared.
    """
    cp = world if options.cp is None else options.cp
    if world % cp:
        raise UsageError(f"--cp {cp} does not divide the {world} processes; choose one of {_divisors(world)}")
    degree = options.ulysses_degree
    if degree is not None and cp % degree:
        raise UsageError(
            f"--ulysses-degree {degree} does not divide the {cp} context-parallel ranks; choose one of {_divisors(cp)}"
        )
    if options.seq_len < 2 * cp:
        raise UsageError(
            f"--seq-len {options.seq_len} is too short for {cp} context-parallel ranks: each holds two pieces "
            f"of a sequence, so it needs at least {2 * cp} tokens"
        )
    return Ranks(data_parallel=world // cp, context_parallel=cp)


def learning_rate(options: TrainOptions, step: int) -> float:
    """Learning rate of step `step` (0-based): linear warm-up to `lr`, then half a cosine down to `min_lr`."""
    if step < options.warmup:
        return options.lr * (step + 1) / options.warmup
    done = (step - options.warmup) / max(1, options.steps - options.warmup)
    floor = min(options.min_lr, options.lr)
    return floor + (options.lr - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def _save_policies(scheme: str) -> tuple[str, ...]:
    """What attention can keep with a scheme; whichever scheme `auto` chooses, it must be able to."""
    schemes = SCHEMES if scheme == "auto" else (scheme,)
    return tuple(policy for policy in SAVE_POLICIES[schemes[0]] if all(policy in SAVE_POLICIES[s] for s in schemes))


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
