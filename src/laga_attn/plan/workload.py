"""What is to be planned: a model, its sequence, and how many ranks of which kind share it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, cast

import torch

from laga_attn.attention_plan import SAVE_POLICIES, SCHEMES, LatentDims, Save, Scheme
from laga_attn.auto import legal_degrees
from laga_attn.config import MLAConfig
from laga_attn.layout import SequenceLayout
from laga_attn.presets import hf_config, preset_names
from laga_attn.train.errors import UsageError

__all__ = ["DTYPES", "Candidate", "Workload", "candidates", "load_model", "parse_tokens"]

DTYPES: Final = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_AT_LEAST_ONE: Final = {
    "seq_len": "--seq-len",
    "cp": "--cp",
    "tp": "--tp",
    "dp": "--dp",
    "batch": "--batch",
    "devices_per_node": "--gpus-per-node",
}
_UNITS: Final = {"k": 2**10, "m": 2**20}


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run attention; `two_level` takes latents between nodes once and spreads them inside."""

    scheme: Scheme
    ulysses_degree: int
    save: Save
    two_level: bool = False

    def __str__(self) -> str:
        return f"{self.scheme} U={self.ulysses_degree} save={self.save}" + (" two-level" if self.two_level else "")


@dataclass(frozen=True, slots=True)
class Workload:
    """One MLA layer over one sequence per context-parallel group.

    Ranks are placed tensor-parallel first, then context-parallel, then data-parallel: context rank r of the first
    group is device `r * tp`, on node `r * tp // devices_per_node`.
    """

    cfg: MLAConfig
    seq_len: int
    cp: int
    tp: int = 1
    dp: int = 1
    batch: int = 1
    devices_per_node: int = 8
    dtype: str = "bf16"

    def __post_init__(self) -> None:
        for name, option in _AT_LEAST_ONE.items():
            if getattr(self, name) < 1:
                raise UsageError(f"{option} must be at least 1, got {getattr(self, name)}")
        heads, cp = self.cfg.num_attention_heads, self.cp
        if heads % self.tp:
            raise UsageError(
                f"--tp {self.tp} does not divide the model's {heads} heads; choose one of {_divisors(heads)}"
            )
        if cp > 1 and self.seq_len % (2 * cp):
            near = max(1, round(self.seq_len / (2 * cp))) * 2 * cp
            raise UsageError(
                f"--cp {cp} does not divide {self.seq_len} tokens into the 2 x {cp} chunks of the zigzag layout; "
                f"choose --seq-len {near}, or --cp out of {_cp_sizes(self.seq_len)}"
            )
        if self.tp > self.devices_per_node or self.devices_per_node % self.tp:
            raise UsageError(
                f"--tp {self.tp} does not divide the {self.devices_per_node} devices of a node, "
                f"in which tensor-parallel ranks live; choose one of {_divisors(self.devices_per_node)}"
            )
        if self.dtype not in DTYPES:
            raise UsageError(f"--dtype {self.dtype} is unknown; choose one of {', '.join(DTYPES)}")

    @property
    def layer(self) -> MLAConfig:
        """The part of the layer that one tensor-parallel rank holds: its heads, and all of the latents."""
        return replace(self.cfg, num_attention_heads=self.cfg.num_attention_heads // self.tp)

    @property
    def dims(self) -> LatentDims:
        cfg = self.layer
        return LatentDims(
            cfg.num_attention_heads, cfg.qk_nope_head_dim, cfg.qk_rope_head_dim, cfg.v_head_dim, cfg.kv_lora_rank
        )

    @property
    def layout(self) -> SequenceLayout:
        return SequenceLayout.zigzag(self.seq_len, self.cp)

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize

    @property
    def devices(self) -> int:
        return self.tp * self.cp * self.dp

    @property
    def ranks_per_node(self) -> int:
        """Context-parallel ranks of one group in one node."""
        return min(self.cp, self.devices_per_node // self.tp)

    def node_of(self, rank: int) -> int:
        """The node of a context-parallel rank of the first group."""
        return rank * self.tp // self.devices_per_node


def candidates(
    workload: Workload,
    schemes: Iterable[str] = SCHEMES,
    degrees: Iterable[int] | None = None,
    saves: Iterable[str] = ("auto",),
) -> list[Candidate]:
    """Everything that may be run: each scheme at each legal Ulysses degree with each of its save policies.

    Args:
        schemes: out of explicit, absorbed and laga.
        degrees: None: all that divide ranks and heads.
        saves: policies; `"auto"` is a scheme's default, and a policy that a scheme does not have is passed over.

    Raises:
        UsageError: a degree that is not possible, or nothing is left.
    """
    heads = workload.dims.num_heads
    legal = legal_degrees(workload.cp, heads)
    chosen = legal if degrees is None else list(degrees)
    for degree in chosen:
        if degree not in legal:
            raise UsageError(
                f"--ulysses-degree {degree} must divide {workload.cp} ranks and {heads} heads; "
                f"choose among {', '.join(map(str, legal))}"
            )
    found: list[Candidate] = []
    for scheme in schemes:
        policies = SAVE_POLICIES[scheme]
        wanted = [policies[0] if save == "auto" else save for save in saves]
        for save in (save for save in policies if save in wanted):
            for degree in chosen:
                for two_level in _levels(workload, scheme, degree):
                    found.append(Candidate(cast(Scheme, scheme), degree, save, two_level))
    if not found:
        raise UsageError(f"none of the schemes {', '.join(schemes)} has a save policy {', '.join(saves)}")
    return found


def _levels(workload: Workload, scheme: str, degree: int) -> tuple[bool, ...]:
    """Gathering in two levels saves network where a Ulysses group is a node, and there only."""
    is_node = degree == workload.ranks_per_node and 1 < degree < workload.cp
    return (False, True) if is_node and scheme != "explicit" else (False,)


def load_model(source: str) -> tuple[dict[str, Any], MLAConfig]:
    """The Hugging Face configuration of a preset, a `config.json` or the folder that holds one, and its MLA layer.

    Raises:
        UsageError: none of these, or not an MLA model.
    """
    path = Path(source)
    if source in preset_names():
        hf: Mapping[str, Any] = hf_config(source)
    elif path.exists():
        file = path / "config.json" if path.is_dir() else path
        try:
            hf = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UsageError(f"--model {file}: {error}") from None
    else:
        raise UsageError(
            f"--model {source}: neither a preset ({', '.join(preset_names())}) nor a config.json or its folder"
        )
    if not isinstance(hf, Mapping):
        raise UsageError(f"--model {source}: expected a JSON object with the keys of a Hugging Face config.json")
    try:
        return dict(hf), MLAConfig.from_hf(hf)
    except ValueError as error:
        raise UsageError(f"--model {source}: {error}") from None


def parse_tokens(text: str) -> int:
    """`"131072"`, `"128K"` or `"1M"` (powers of two) as a number of tokens.

    Raises:
        UsageError: anything else.
    """
    number, unit = (text[:-1], _UNITS[text[-1].lower()]) if text and text[-1].lower() in _UNITS else (text, 1)
    try:
        tokens = float(number) * unit
    except ValueError:
        tokens = math.nan
    if not tokens >= 1 or tokens != int(tokens):
        raise UsageError(f"--seq-len {text}: give a number of tokens such as 131072, 128K or 1M")
    return int(tokens)


def _divisors(number: int) -> str:
    return ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)


def _cp_sizes(tokens: int) -> str:
    """Up to a few sizes that divide, the largest last."""
    sizes = [cp for cp in range(2, 1025) if tokens % (2 * cp) == 0]
    return ", ".join(map(str, [1, *sizes[-8:]]))
