"""The core-attention module of a LAGA layer: it takes queries and local latents, and owns no parameters."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from laga_attn.attention import latent_attention
from laga_attn.attention_plan import LatentDims
from laga_attn.auto import flops_per_port_byte
from laga_attn.grid import ContextParallel
from laga_attn.integrations.megatron.masks import is_causal, window_of
from laga_attn.integrations.megatron.max_logits import max_attention_logits
from laga_attn.integrations.megatron.options import LatentOptions, cheapest_degree, context_parallel
from laga_attn.integrations.megatron.packing import layout_of
from laga_attn.integrations.megatron.refusals import check_config
from laga_attn.integrations.megatron.up_projection import up_weight
from laga_attn.layout import SequenceLayout

__all__ = ["LatentCoreAttention"]


class LatentCoreAttention(MegatronModule):  # type: ignore[misc]
    """Calls `latent_attention` with what its layer gives it.

    Megatron builds it in place of the stock core attention, whose arguments it takes. The weight that it needs
    belongs to the layer's `linear_kv_up_proj` and is looked up there at every call.

    Args:
        options: scheme, Ulysses degree and what is kept for backward.
        reference: the core-attention spec that it stands in for, which `verify` needs.

    Raises:
        ValueError: an option of Megatron that cannot work, see `support_table`.
    """

    current_max_attn_logits: Tensor | None
    """`[H / TP]` largest logits since the last `clip_qk`, kept with `qk_clip` or `log_max_attention_logit`."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        model_comm_pgs: Any = None,
        *,
        options: LatentOptions,
        reference: Any,
    ) -> None:
        super().__init__(config=config)
        check_config(config)
        if attention_dropout:
            raise ValueError(f"attention_dropout={attention_dropout} does not work with latent attention; set it to 0")
        groups = model_comm_pgs if pg_collection is None else pg_collection
        self.dims = LatentDims(
            num_heads=config.num_attention_heads // groups.tp.size(),
            qk_nope_head_dim=config.qk_head_dim,
            qk_rope_head_dim=config.qk_pos_emb_head_dim,
            v_head_dim=config.v_head_dim,
            kv_lora_rank=config.kv_lora_rank,
        )
        mine = ("self", self.dims.qk_head_dim, self.dims.v_head_dim)
        given = (attention_type, k_channels or mine[1], v_channels or mine[2])
        if given != mine:
            raise ValueError(
                f"LatentCoreAttention is made for an MLA layer with attention_type, k_channels, v_channels = {mine}, "
                f"not for {given}; use with_laga"
            )
        self.options = options
        self.reference = reference
        self.attn_mask_type = attn_mask_type
        self.softmax_scale = self.dims.qk_head_dim**-0.5 if softmax_scale is None else softmax_scale
        self.window = window_of(config, layer_number)
        self.cp_comm_type = cp_comm_type
        self.cp = context_parallel(groups.cp, options.ulysses_degree, cp_comm_type)
        self.current_max_attn_logits = None
        self._tracks_max_logits = any(getattr(config, o, False) for o in ("qk_clip", "log_max_attention_logit"))
        self._layer: tuple[Any, ...] = ()
        self.register_load_state_dict_pre_hook(_drop_extra_state)

    def bind(self, layer: Any) -> None:
        """Name the layer whose up-projection is meant; a tuple, so that it does not become a submodule."""
        self._layer = (layer,)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor | None,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Attention of this rank's tokens.

        Args:
            query: `[s, b, H / TP, nope + rope]`, or packed `[t, H / TP, nope + rope]`; rotated.
            key: `[s, b, kv_lora_rank + rope]`, or `[t, kv_lora_rank + rope]`: the latent after its norm beside the
                rotated shared key part.
            value, attention_bias: None.
            attention_mask: not read by causal masks; None for others.

        Returns:
            `[s, b, H / TP * v]`, or `[t, H / TP * v]`.
        """
        if value is not None or attention_bias is not None or not self._layer:
            raise ValueError(
                "LatentCoreAttention got the keys and values of a stock layer: the class of the attention layer was "
                "changed after with_laga, as hybrid models do for mla_down_proj_fusion; turn that off"
            )
        causal = is_causal(self.attn_mask_type if attn_mask_type is None else attn_mask_type, attention_mask)
        layout = layout_of(packed_seq_params, query.shape[0], self.cp.size)
        packed = query.ndim == 3
        q, latent = (x.unsqueeze(0) if packed else x.transpose(0, 1) for x in (query, key))  # [b, s, ...]
        c_kv, k_rope = latent[..., : self.dims.kv_lora_rank], latent[..., self.dims.kv_lora_rank :]
        weight = up_weight(self._layer[0])
        out = latent_attention(
            q, c_kv, k_rope, weight, layout=layout, cp=self._grid(q, layout, causal),
            scheme=self.options.scheme, qk_nope_head_dim=self.dims.qk_nope_head_dim, v_head_dim=self.dims.v_head_dim,
            softmax_scale=self.softmax_scale, causal=causal, window=self.window, save=self.options.save,
        )  # [b, s, h, v]  # fmt: skip
        if self._tracks_max_logits:
            largest = max_attention_logits(
                q, c_kv, k_rope, weight, layout=layout, cp=self.cp, dims=self.dims,
                softmax_scale=self.softmax_scale, causal=causal, window=self.window,
            )  # fmt: skip
            before = self.current_max_attn_logits
            self.current_max_attn_logits = largest if before is None else torch.maximum(before, largest)
        return out.squeeze(0).flatten(1) if packed else out.transpose(0, 1).flatten(2)

    def _grid(self, q: Tensor, layout: SequenceLayout, causal: bool) -> ContextParallel:
        """The ranks with a Ulysses degree; `scheme="auto"` chooses one together with the scheme."""
        if self.cp.size == 1 or self.cp.ulysses_degree is not None or self.options.scheme == "auto":
            return self.cp
        itemsize = q.element_size()
        degree = cheapest_degree(
            self.options, self.dims, layout, causal=causal, window=self.window, batch=q.shape[0], itemsize=itemsize,
            flops_per_port_byte=flops_per_port_byte(self.cp.flops_per_port_byte, q.device.type, itemsize),
        )  # fmt: skip
        return self.cp.with_ulysses(degree)


def _drop_extra_state(module: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Transformer Engine's core attention keeps an entry for FP8 in checkpoints, which says nothing here."""
    state_dict.pop(f"{prefix}_extra_state", None)
