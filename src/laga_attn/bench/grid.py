"""What a bench measures: cells (sizes), the variants that race in each of them, and presets of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch

from laga_attn.attention_plan import SAVE_POLICIES, SCHEMES, LatentDims
from laga_attn.auto import choose, flops_per_port_byte, legal_degrees
from laga_attn.layout import SequenceLayout
from laga_attn.train.errors import UsageError

__all__ = ["DTYPES", "PRESETS", "Cell", "Grid", "Variant", "baseline_of", "preset"]

DTYPES: Final = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One size: everything that the variants of a race have in common."""

    ranks: int
    seq_len: int
    num_heads: int
    dtype: str  # a key of DTYPES

    @property
    def dims(self) -> LatentDims:
        """DeepSeek-V2 and -V3 head sizes; the number of heads is the cell's."""
        return LatentDims(self.num_heads, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, kv_lora_rank=512)

    @property
    def attention_flops(self) -> int:
        """FLOPs of causal attention forward and backward, all ranks together, a multiply-add being two.

        Scores and outputs in head space, over the visible pairs alone: 2 GEMMs forward and 5 backward. What a scheme
        computes beyond them (rebuilt K and V, wider heads) does not count as work, only as time.
        """
        pairs = self.seq_len * (self.seq_len + 1) // 2
        dims = self.dims
        return 2 * pairs * self.num_heads * (4 * dims.qk_head_dim + 3 * dims.v_head_dim)

    @property
    def layout(self) -> SequenceLayout:
        return SequenceLayout.zigzag(self.seq_len, self.ranks)

    def __str__(self) -> str:
        return f"P={self.ranks} S={self.seq_len} H={self.num_heads} {self.dtype}"


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to run a cell. A degree of None is left to `scheme="auto"`, which weighs with `flops_per_port_byte`."""

    scheme: str
    ulysses_degree: int | None
    save: str
    flops_per_port_byte: float | None = None

    def name_in(self, cell: Cell, device: str = "cpu") -> str:
        """What reports call it; of `"auto"` also what it comes to in this cell."""
        if self.ulysses_degree is not None:
            return f"{self.scheme} U={self.ulysses_degree} {self.save}"
        itemsize = DTYPES[cell.dtype].itemsize
        weight = flops_per_port_byte(self.flops_per_port_byte, device, itemsize)
        scheme, degree = choose(cell.dims, cell.layout, causal=True, itemsize=itemsize, flops_per_port_byte=weight)
        return f"auto ({scheme} U={degree})"


def baseline_of(cell: Cell) -> Variant:
    """Explicit Ulysses with kept K and V, what every other variant is compared with.

    With more ranks than heads there is no pure Ulysses; then it is the largest degree that there is.
    """
    return Variant("explicit", max(legal_degrees(cell.ranks, cell.num_heads)), "kv")


@dataclass(frozen=True, slots=True)
class Grid:
    """The cross product of its fields; combinations that a scheme does not have are left out.

    Attributes:
        degrees: Ulysses degrees; None for every one that divides ranks and heads.
        rounds: how often each variant is timed.
        flops_per_port_byte: what `scheme="auto"` weighs with; None for the default of the device and dtype.
    """

    ranks: tuple[int, ...]
    seq_lens: tuple[int, ...]
    heads: tuple[int, ...]
    dtypes: tuple[str, ...]
    schemes: tuple[str, ...]
    degrees: tuple[int, ...] | None
    saves: tuple[str, ...]
    rounds: int
    flops_per_port_byte: float | None = None

    def __post_init__(self) -> None:
        for option, numbers in (
            ("--ranks", self.ranks),
            ("--seq-len", self.seq_lens),
            ("--heads", self.heads),
            ("--ulysses-degree", self.degrees or ()),
            ("--rounds", (self.rounds,)),
        ):
            _refuse(option, [n for n in numbers if n < 1], "numbers from 1 on")
        if self.flops_per_port_byte is not None and not self.flops_per_port_byte > 0:
            raise UsageError(f"--flops-per-port-byte {self.flops_per_port_byte} is not possible; it must be above 0")
        for option, names, known in (
            ("--dtype", self.dtypes, tuple(DTYPES)),
            ("--scheme", self.schemes, (*SCHEMES, "auto")),
            ("--save", self.saves, SAVE_POLICIES["laga"]),
        ):
            _refuse(option, [name for name in names if name not in known], ", ".join(known))
        for cell in self.cells():
            usable = legal_degrees(cell.ranks, cell.num_heads)
            if self.degrees is not None and not set(usable) & set(self.degrees):
                raise UsageError(
                    f"--ulysses-degree {', '.join(map(str, self.degrees))}: none divides {cell.ranks} ranks and "
                    f"{cell.num_heads} heads; choose among {', '.join(map(str, usable))}"
                )

    def cells(self) -> list[Cell]:
        return [
            Cell(ranks, seq_len, heads, dtype)
            for ranks in self.ranks
            for heads in self.heads
            for dtype in self.dtypes
            for seq_len in self.seq_lens
        ]

    def variants(self, cell: Cell) -> list[Variant]:
        """The variants of a cell, the baseline first whether or not it was asked for."""
        degrees = legal_degrees(cell.ranks, cell.num_heads)
        named = [
            Variant(scheme, degree, save)
            for scheme in self.schemes
            if scheme != "auto"
            for degree in reversed(degrees)
            if self.degrees is None or degree in self.degrees
            for save in SAVE_POLICIES[scheme]
            if save in self.saves
        ]
        auto = [Variant("auto", None, "auto", self.flops_per_port_byte)] if "auto" in self.schemes else []
        return list(dict.fromkeys([baseline_of(cell), *named, *auto]))

    def override(self, **fields: Sequence[object] | float | None) -> Grid:
        """This grid with the fields that are given, meaning not None and not empty."""
        given = {name: tuple(v) if isinstance(v, Sequence) else v for name, v in fields.items() if v}
        return replace(self, **given)  # type: ignore[arg-type]


def _refuse(option: str, wrong: Sequence[object], rule: str) -> None:
    if wrong:
        raise UsageError(f"{option} {wrong[0]} is not possible; choose among {rule}")


_ALL_SCHEMES: Final = ("explicit", "laga", "absorbed", "auto")
_ALL_SAVES: Final = ("latent", "gathered", "kv")

PRESETS: Final = {
    "quick": Grid((2,), (2048,), (16,), ("bf16",), _ALL_SCHEMES, None, ("latent", "kv"), rounds=5),
    "full": Grid((2, 4), (2048, 8192), (16,), ("fp32", "bf16"), _ALL_SCHEMES, None, _ALL_SAVES, rounds=5),
    # The published measurement's layer and ranks, its longest sequence and one short enough to show the other side.
    "paper": Grid((8,), (4096, 16384), (128,), ("bf16",), _ALL_SCHEMES, (8,), _ALL_SAVES, rounds=3),
}


def preset(name: str) -> Grid:
    """A grid by name.

    Raises:
        UsageError: an unknown name.
    """
    if name not in PRESETS:
        raise UsageError(f"--preset {name!r} is unknown; choose one of {', '.join(PRESETS)}")
    return PRESETS[name]
