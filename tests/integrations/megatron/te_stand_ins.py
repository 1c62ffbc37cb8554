"""Layers of the shape that Transformer Engine's have in Megatron-Core, computed on the CPU.

They stand in for it where only its interface matters: a down-projection that every tensor-parallel rank holds whole,
and an up-projection with its norm fused in.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer import multi_latent_attention
from torch import Tensor, nn

try:
    from megatron.core.transformer import mla_qk_norm_config
except ImportError:  # releases before 0.19 take the norms as the spec has them
    mla_qk_norm_config = None

__all__ = ["DuplicatedLinear", "NormColumnParallelLinear", "te_stand_ins"]


class DuplicatedLinear(nn.Module):
    """`TELinear` with `parallel_mode="duplicated"`: the whole weight on every rank, rows as they come."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, init_method: Any, **_: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(output_size, input_size))
        init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return nn.functional.linear(x, self.weight), None

    def backward_dw(self) -> None:
        pass


class NormColumnParallelLinear(ColumnParallelLinear):  # type: ignore[misc]
    """`TELayerNormColumnParallelLinear`: the norm's weight and the projection's in one module."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **arguments: Any) -> None:
        super().__init__(input_size, output_size, config=config, **arguments)
        gamma = 0.1 if config.layernorm_zero_centered_gamma else 1.1
        self.layer_norm_weight = nn.Parameter(torch.full((input_size,), gamma))
        self.layer_norm_weight.sequence_parallel = config.sequence_parallel
        self.layer_norm_bias = None
        if config.normalization == "LayerNorm":
            self.layer_norm_bias = nn.Parameter(torch.full((input_size,), 0.2))
            self.layer_norm_bias.sequence_parallel = config.sequence_parallel
        self.eps, self.normalization = config.layernorm_epsilon, config.normalization
        self.zero_centered_gamma = config.layernorm_zero_centered_gamma

    def forward(self, x: Tensor) -> Any:
        gamma = self.layer_norm_weight + 1 if self.zero_centered_gamma else self.layer_norm_weight
        if self.normalization == "LayerNorm":
            x = x - x.mean(-1, keepdim=True)
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * gamma
        return super().forward(x if self.layer_norm_bias is None else x + self.layer_norm_bias)


class FusingBackend(LocalSpecProvider):  # type: ignore[misc]
    """Local layers, and an up-projection with its norm fused in."""

    def column_parallel_layer_norm_linear(self) -> type:
        return NormColumnParallelLinear


@contextmanager
def te_stand_ins() -> Iterator[None]:
    """Let the MLA layer take these layers for Transformer Engine's inside the block."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(multi_latent_attention, "TELinear", DuplicatedLinear))
        if mla_qk_norm_config is not None:
            stack.enter_context(mock.patch.object(mla_qk_norm_config, "get_backend", return_value=FusingBackend()))
        yield
