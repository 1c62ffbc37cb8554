"""MultiheadLatentAttention: one MLA layer whose tokens are split over context-parallel ranks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from laga_attn.agreement import agree
from laga_attn.attention import latent_attention
from laga_attn.config import MLAConfig
from laga_attn.grid import ContextParallel
from laga_attn.kernels import KernelName
from laga_attn.layout import SequenceLayout
from laga_attn.prefetch import prefetch_latent
from laga_attn.rope import Pairing, apply_rope, rope_cos_sin

__all__ = ["MultiheadLatentAttention"]


class MultiheadLatentAttention(nn.Module):
    """The attention layer of DeepSeek-V2/V3 over a sequence that is split over the ranks of ``cp``.

    Parameters have the names and shapes of ``DeepseekV3Attention`` in Transformers, so its state dicts load
    unchanged. They are the same on every rank; after backward each rank holds its tokens' part of their
    gradients, to be summed over ``cp``.

    Args:
        cfg: sizes, RoPE and softmax scale of the layer.
        cp: the ranks; ``None`` or ``ContextParallel.none()`` for one process.
        scheme: see :func:`laga_attn.latent_attention`, as for ``save``, ``kernel`` and ``head_group``.
        save: what is kept for backward.
        kernel: what computes attention on one rank.
        head_group: heads whose K and V are rebuilt at a time.
        softmax_scale: factor on scores; ``None``: ``cfg.softmax_scale``.
        device: where parameters are created.
        dtype: of the parameters.
    """

    def __init__(
        self,
        cfg: MLAConfig,
        *,
        cp: ContextParallel | None = None,
        scheme: str = "laga",
        save: str = "auto",
        kernel: KernelName = "auto",
        head_group: int | None = None,
        softmax_scale: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.cfg = cfg
        self.cp = ContextParallel.none() if cp is None else cp
        self.scheme, self.save, self.kernel, self.head_group = scheme, save, kernel, head_group
        self.softmax_scale = cfg.softmax_scale if softmax_scale is None else softmax_scale

        def linear(inputs: int, outputs: int, bias: bool = False) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=bias, device=device, dtype=dtype)

        def norm(width: int) -> nn.RMSNorm:
            return nn.RMSNorm(width, eps=cfg.latent_norm_eps, device=device, dtype=dtype)

        heads, bias = cfg.num_attention_heads, cfg.attention_bias
        if cfg.q_lora_rank is None:
            self.q_proj = linear(cfg.hidden_size, heads * cfg.qk_head_dim)
        else:
            self.q_a_proj = linear(cfg.hidden_size, cfg.q_lora_rank, bias)
            self.q_a_layernorm = norm(cfg.q_lora_rank)
            self.q_b_proj = linear(cfg.q_lora_rank, heads * cfg.qk_head_dim)
        self.kv_a_proj_with_mqa = linear(cfg.hidden_size, cfg.kv_lora_rank + cfg.qk_rope_head_dim, bias)
        self.kv_a_layernorm = norm(cfg.kv_lora_rank)
        self.kv_b_proj = linear(cfg.kv_lora_rank, heads * (cfg.qk_nope_head_dim + cfg.v_head_dim))
        self.o_proj = linear(heads * cfg.v_head_dim, cfg.hidden_size, bias)

    def forward(
        self,
        hidden_states: Tensor,
        layout: SequenceLayout,
        positions: Tensor | None = None,
        *,
        causal: bool = True,
        window: int | None = None,
    ) -> Tensor:
        """Attend from this rank's tokens to the whole sequence.

        Args:
            hidden_states: ``[B, s, hidden_size]``, s = ``layout.local_len``: the rows of this rank.
            layout: who holds which token.
            positions: ``[s]`` or ``[B, s]`` integers for RoPE, instead of ``layout.positions(cp.rank)``. They
                turn queries and keys, and do not change who sees whom.
            causal: a token sees itself and earlier tokens of its document; otherwise its whole document.
            window: with ``causal``, how many tokens one sees at most, itself included; ``None``: no limit.

        Returns:
            ``[B, s, hidden_size]``; rows of pads are 0, whatever they held.

        Raises:
            ValueError: arguments that do not fit, on every rank, before data moves.
        """
        problem = self._problem(hidden_states, layout, positions)
        if problem is not None:
            agree(self.cp, {}, problem)  # raises here, and where the other ranks ask for agreement
        pads = _pads(layout, self.cp.rank, hidden_states.device)
        if pads is not None:
            # A NaN in a pad would reach the weights' gradients through 0 * NaN.
            hidden_states = hidden_states.masked_fill(pads, 0)
        if positions is None:
            positions = layout.positions(self.cp.rank)
        # fp32 even for bf16 layers: bf16 cannot tell neighbouring positions of a long sequence apart.
        wide = torch.float64 if hidden_states.dtype == torch.float64 else torch.float32
        cos, sin = rope_cos_sin(self.cfg, positions.to(hidden_states.device), dtype=wide)  # [.., s, rope / 2]
        c_kv, k_rope = self.latent(hidden_states, cos, sin)
        gather = None
        if self.cp.size > 1 and self.scheme in ("laga", "absorbed"):  # latents travel while queries are projected
            gather = prefetch_latent(
                c_kv, k_rope, layout=layout, cp=self.cp, scheme=self.scheme, causal=causal, window=window
            )
        out = latent_attention(
            self.query(hidden_states, cos, sin),
            c_kv,
            k_rope,
            self.kv_b_proj.weight,
            layout=layout,
            cp=self.cp,
            scheme=self.scheme,
            qk_nope_head_dim=self.cfg.qk_nope_head_dim,
            v_head_dim=self.cfg.v_head_dim,
            softmax_scale=self.softmax_scale,
            causal=causal,
            window=window,
            save=self.save,
            kernel=self.kernel,
            head_group=self.head_group,
            prefetched=gather,
        )  # [B, s, H, v]
        projected: Tensor = self.o_proj(out.flatten(2))
        return projected if pads is None else projected.masked_fill(pads, 0)

    def latent(self, hidden_states: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """What travels: normalised latents ``[B, s, kv_lora_rank]``, rotated key parts ``[B, s, rope]``."""
        compressed = self.kv_a_proj_with_mqa(hidden_states)
        c_kv, k_rope = compressed.split([self.cfg.kv_lora_rank, self.cfg.qk_rope_head_dim], dim=-1)
        return _normalised(self.kv_a_layernorm, c_kv), apply_rope(k_rope, cos, sin, self._pairing)

    def query(self, hidden_states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """All heads' queries ``[B, s, H, nope + rope]``, the rope part rotated."""
        if self.cfg.q_lora_rank is None:
            q = self.q_proj(hidden_states)
        else:
            q = self.q_b_proj(_normalised(self.q_a_layernorm, self.q_a_proj(hidden_states)))
        q = q.unflatten(-1, (self.cfg.num_attention_heads, self.cfg.qk_head_dim))
        q_nope, q_rope = q.split([self.cfg.qk_nope_head_dim, self.cfg.qk_rope_head_dim], dim=-1)
        cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)  # the same for all heads
        return torch.cat((q_nope, apply_rope(q_rope, cos, sin, self._pairing)), dim=-1)

    def extra_repr(self) -> str:
        return f"scheme={self.scheme!r}, cp_size={self.cp.size}, softmax_scale={self.softmax_scale:.6f}"

    @property
    def _pairing(self) -> Pairing:
        return "interleave" if self.cfg.rope_interleave else "half"

    def _problem(self, hidden: Tensor, layout: SequenceLayout, positions: Tensor | None) -> str | None:
        """What would fail, or go wrong unseen, before :func:`latent_attention` can look at it."""
        tokens, batch = layout.local_len, hidden.shape[0]
        if layout.cp_size != self.cp.size:
            return f"the layout is for {layout.cp_size} ranks, the group has {self.cp.size}: build it anew"
        if hidden.ndim != 3 or hidden.shape[1:] != (tokens, self.cfg.hidden_size):
            return (
                f"hidden_states must be [B, {tokens}, {self.cfg.hidden_size}], one rank's tokens in this "
                f"layout by hidden_size; got {list(hidden.shape)}. Shard the sequence with layout.shard"
            )
        if positions is not None and positions.shape not in ((tokens,), (batch, tokens)):
            return (
                f"positions must be [{tokens}] or [{batch}, {tokens}], one for each row of this rank; got "
                f"{list(positions.shape)}"
            )
        if not isinstance(self.kv_b_proj, nn.Linear):
            return (
                f"kv_b_proj is now a {type(self.kv_b_proj).__name__}, but its weight is used without calling "
                "it: merge the adapter into the weight, or do not target this projection"
            )
        return None


def _normalised(norm: nn.RMSNorm, x: Tensor) -> Tensor:
    # Under autocast x is bf16 and the weight fp32, a mixture for which PyTorch has no fused norm.
    y: Tensor = norm(x.to(norm.weight.dtype))
    return y.to(x.dtype)


def _pads(layout: SequenceLayout, rank: int, device: torch.device) -> Tensor | None:
    """``[s, 1]``, true for the rows of this rank that are no tokens; ``None`` if no rank has any."""
    if layout.padded_len == layout.seq_len:
        return None
    return torch.tensor(layout.rows(rank) < 0, device=device).unsqueeze(-1)
