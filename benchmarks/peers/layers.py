"""Whole layers: `DeepseekV3Attention` of HF Transformers in one process with all cores, against ours on all ranks.

Transformers has no context parallelism, so a sequence is one process's there. Weights and hidden states are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from benchmarks.peers import transformers_attention
from torch import Tensor, nn

from laga_attn.bench.grid import DTYPES, Cell
from laga_attn.bench.malloc import keep_freed_memory
from laga_attn.bench.memory import TensorMemory
from laga_attn.bench.race import race
from laga_attn.config import MLAConfig
from laga_attn.grid import ContextParallel
from laga_attn.module import MultiheadLatentAttention
from laga_attn.presets import hf_config

__all__ = ["OURS", "LayerRun", "race_layers"]

OURS: Final = "MultiheadLatentAttention, all ranks"
_HIDDEN: Final = 2048
_IMPLEMENTATIONS: Final = ("eager", "sdpa")


@dataclass(frozen=True, slots=True)
class LayerRun:
    """Of one rank: seconds by name and round, bytes of tensors that existed at once, and the difference of outputs."""

    seconds: dict[str, list[float]]
    peak: dict[str, int]
    difference: dict[str, float]


def race_layers(cell: Cell, rounds: int, cores: int) -> LayerRun:
    """Forward and backward of one layer, gradients of weights included, on the default process group."""
    keep_freed_memory()
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    config, dtype = _config(cell), DTYPES[cell.dtype]
    torch.manual_seed(0)
    theirs = {name: transformers_attention.layer(config, name, dtype) for name in _IMPLEMENTATIONS}
    for module in theirs.values():
        module.load_state_dict(theirs["eager"].state_dict())
    ours = MultiheadLatentAttention(MLAConfig.from_hf(config), cp=ContextParallel(group), scheme="auto", dtype=dtype)
    ours.load_state_dict(theirs["eager"].state_dict())
    hidden = torch.randn(1, cell.seq_len, _HIDDEN).to(dtype)
    local = cell.layout.shard(hidden, rank).requires_grad_()
    hidden.requires_grad_()

    def in_one_process(module: nn.Module) -> Callable[[], Tensor | None]:
        arguments = _arguments(module, hidden)

        def step() -> Tensor | None:
            if rank != 0:
                return None
            torch.set_num_threads(cores)
            out: Tensor = module(hidden, **arguments)[0]
            out.sum().backward()
            torch.set_num_threads(max(1, cores // cell.ranks))
            return out.detach()

        return step

    def on_all_ranks() -> Tensor:
        out: Tensor = ours(local, cell.layout)
        out.sum().backward()
        return out.detach()

    steps: dict[str, Callable[[], Tensor | None]] = {OURS: on_all_ranks}
    steps |= {f"DeepseekV3Attention, {name}": in_one_process(module) for name, module in theirs.items()}
    peak, difference = {}, {}
    parts = [torch.empty_like(local) for _ in range(cell.ranks)]
    dist.all_gather(parts, on_all_ranks())
    whole = cell.layout.unshard(parts)
    for name, step in steps.items():
        memory = TensorMemory()
        with memory:
            out = step()
        peak[name] = memory.peak
        if out is not None and name != OURS:
            difference[name] = float((out.double() - whole.double()).abs().max() / whole.double().abs().max())
    return LayerRun(race(steps, rounds, dist.barrier), peak, difference)


def _config(cell: Cell) -> dict[str, Any]:
    """DeepSeek-V3's layer with fewer heads, a smaller hidden size, and queries without a latent of their own."""
    heads = {"num_attention_heads": cell.num_heads, "num_key_value_heads": cell.num_heads}
    return {**hf_config("deepseek-v3"), **heads, "hidden_size": _HIDDEN, "q_lora_rank": None, "rope_scaling": None}


def _arguments(module: nn.Module, hidden: Tensor) -> dict[str, Any]:
    """What the model hands to each of its layers: made once, not part of a step."""
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding

    length = hidden.shape[1]
    positions = torch.arange(length)[None]
    mask = None
    if module.config._attn_implementation == "eager":
        mask = torch.full((length, length), torch.finfo(hidden.dtype).min, dtype=hidden.dtype).triu_(1)[None, None]
    rotary = DeepseekV3RotaryEmbedding(module.config)
    return {"position_embeddings": rotary(hidden.detach(), positions), "attention_mask": mask}
