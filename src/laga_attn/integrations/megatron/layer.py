"""MLA layers that hand latents to attention, instead of every head's keys and values."""

from __future__ import annotations

from typing import Any, Final, cast

import torch
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor

from laga_attn.integrations.megatron.core_attention import LatentCoreAttention
from laga_attn.integrations.megatron.features import (
    FUSED_ATTENTION,
    RETURNS_COMPRESSED,
    process_groups,
)
from laga_attn.integrations.megatron.packing import check_packed
from laga_attn.integrations.megatron.rotary import Rotate, rotation
from laga_attn.integrations.megatron.up_projection import take_over

__all__ = ["LATENT_LAYERS", "LatentMLAMixin", "LatentMLASelfAttention"]


class LatentMLAMixin:
    """Turns a stock MLA layer into one that stops before the up-projection of the latent.

    Everything else is the stock layer's: construction, parameters, checkpoints, `forward`. That calls
    `get_query_key_value_tensors`, which here returns the query, this rank's latents as key and None as value, and
    passes them to a `LatentCoreAttention`.
    """

    config: Any
    core_attention: LatentCoreAttention
    kv_layernorm: Any
    linear_kv_down_proj: Any
    linear_kv_up_proj: Any
    linear_q_down_proj: Any
    linear_q_proj: Any
    linear_q_up_proj: Any
    num_attention_heads_per_partition: int
    q_head_dim: int
    q_layernorm: Any
    qkv_up_checkpoint: Any
    recompute_up_proj: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not isinstance(self.core_attention, LatentCoreAttention):
            raise ValueError(
                f"{type(self).__name__} needs a LatentCoreAttention, got {type(self.core_attention).__name__}; "
                "let with_laga make the spec"
            )
        take_over(self.linear_kv_up_proj)
        self.core_attention.bind(self)

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        position_ids: Tensor | None = None,
        packed_seq_params: Any = None,
        inference_context: Any = None,
        *,
        inference_params: Any = None,
    ) -> tuple[Tensor | None, ...]:
        """Query, latent and None; the arguments are those of the stock layer, which reads no positions either.

        Args:
            hidden_states: `[s, b, hidden]`, or `[s / TP, b, hidden]` with sequence parallelism.

        Returns:
            Query `[s, b, H / TP, nope + rope]`, latent `[s, b, kv_lora_rank + rope]`, both rotated, and None; without b
            where documents are packed. Then, from Megatron-Core 0.16, the two compressed inputs of the up-projections.

        Raises:
            ValueError: inference with a cache, cross-attention, or a form of packing that MLA does not have.
        """
        if inference_context is not None or inference_params is not None or key_value_states is not None:
            raise ValueError(
                "latent attention computes whole sequences, without a KV cache and without key_value_states; use the "
                "stock layer for inference: checkpoints fit both"
            )
        check_packed(packed_seq_params)
        rotate = rotation(self, hidden_states, packed_seq_params)
        compressed_q, compressed_kv = self._down_projections(hidden_states)
        latent = self._whole_latent(compressed_kv)  # [s, b, r + dr]
        if packed_seq_params is not None:
            compressed_q, latent = compressed_q.squeeze(1), latent.squeeze(1)
        if self.config.q_lora_rank is not None:
            compressed_q = self.q_layernorm(compressed_q)
        query = self._query(compressed_q, rotate)
        rank = self.config.kv_lora_rank
        c_kv, k_rope = latent[..., :rank], rotate(latent[..., None, rank:]).squeeze(-2)
        key = torch.cat([c_kv, k_rope], dim=-1)
        if RETURNS_COMPRESSED:
            return query, key, None, compressed_q, c_kv
        return query, key, None

    def _down_projections(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """The compressed query, ready for its norm, and the latent as its projection leaves it."""
        if hasattr(self, "_qkv_down_projection"):  # from 0.17, and the fused layer has its own
            return cast(tuple[Tensor, Tensor], self._qkv_down_projection(hidden_states))
        compressed_kv = self.linear_kv_down_proj(hidden_states)[0]
        if self.config.q_lora_rank is None:
            return hidden_states, compressed_kv
        compressed_q = self.linear_q_down_proj(hidden_states)[0]
        if compressed_q.shape[-1] != self.config.q_lora_rank:  # its columns are split over the tensor-parallel ranks
            tp = process_groups(self).tp
            compressed_q = mappings.gather_from_tensor_model_parallel_region(compressed_q, group=tp)
            if self.config.sequence_parallel:
                compressed_q = mappings.scatter_to_sequence_parallel_region(compressed_q, group=tp)
        return compressed_q, compressed_kv

    def _query(self, compressed: Tensor, rotate: Rotate) -> Tensor:
        """`[..., H / TP, nope + rope]`, rotated; computed again in backward with `mla_up_proj` recomputation."""

        def up(compressed: Tensor) -> Tensor:
            project = self.linear_q_proj if self.config.q_lora_rank is None else self.linear_q_up_proj
            query = project(compressed)[0]
            heads = self.num_attention_heads_per_partition
            return rotate(query.view(*query.shape[:-1], heads, self.q_head_dim))

        if not self.recompute_up_proj:
            return up(compressed)
        self.qkv_up_checkpoint = CheckpointWithoutOutput(fp8=None)  # forward() lets it drop the query and recompute it
        return cast(Tensor, self.qkv_up_checkpoint.checkpoint(up, compressed))

    def _whole_latent(self, compressed: Tensor) -> Tensor:
        """Latents of this rank's s tokens, `c_kv` normalised, whole on every tensor-parallel rank.

        One gather over the tensor-parallel ranks at most; the gather over the context-parallel ranks follows in
        `latent_attention`, so every row reaches every rank once. The heads of a rank contribute only a part of the
        latent's gradient, and each way below sums the parts once:

        - columns split over TP, sequence parallel: gather columns; backward is a reduce-scatter. The norm works on
          partial gradients, and Megatron sums those of its weight over TP, as of all norms there.
        - columns split over TP: gather columns; backward all-reduces before the norm and takes the rank's columns.
        - rows split over TP (sequence parallel, projection on every rank): gather rows; backward reduce-scatters.
        - nothing split: backward all-reduces.

        Args:
            compressed: `[s, b, (r + dr) / TP]`, `[s / TP, b, r + dr]` or `[s, b, r + dr]`.
        """
        rank, rope = self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim
        tp, sequence_parallel = process_groups(self).tp, self.config.sequence_parallel
        columns_split = compressed.shape[-1] != rank + rope
        if columns_split and sequence_parallel:
            compressed = mappings.all_gather_last_dim_from_tensor_parallel_region(compressed, group=tp)
        elif columns_split:
            compressed = mappings.gather_from_tensor_model_parallel_region(compressed, group=tp)
        c_kv = self.linear_kv_up_proj(self.kv_layernorm(compressed[..., :rank]))
        latent = torch.cat([c_kv, compressed[..., rank:]], dim=-1)
        if not sequence_parallel:
            latent = mappings.copy_to_tensor_model_parallel_region(latent, group=tp)
        elif not columns_split:
            latent = mappings.gather_from_sequence_parallel_region(latent, group=tp)
        return latent


class LatentMLASelfAttention(LatentMLAMixin, MLASelfAttention):  # type: ignore[misc]
    """`MLASelfAttention` whose latent travels."""


LATENT_LAYERS: Final[dict[type, type]] = {MLASelfAttention: LatentMLASelfAttention}
"""The stock layers that `with_laga` replaces, and by what."""

if FUSED_ATTENTION is not None:

    class LatentFusedMLASelfAttention(LatentMLAMixin, FUSED_ATTENTION):  # type: ignore[misc, valid-type]
        """`FusedMLASelfAttention` whose latent travels."""

    LATENT_LAYERS[FUSED_ATTENTION] = LatentFusedMLASelfAttention
