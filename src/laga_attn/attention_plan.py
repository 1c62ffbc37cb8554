"""AttentionPlan: everything that one attention call decides before it touches a tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from laga_attn.grid import ContextParallel
from laga_attn.kernels import Kernel
from laga_attn.layout import SequenceLayout
from laga_attn.routing import Routing, heads_of, route_tokens

__all__ = ["SAVE_POLICIES", "SCHEMES", "AttentionPlan", "LatentDims", "Save", "Scheme", "routing_of", "streams"]

Scheme = Literal["explicit", "absorbed", "laga"]
Save = Literal["latent", "gathered", "kv"]

SCHEMES: tuple[str, ...] = get_args(Scheme)
SAVE_POLICIES: dict[str, tuple[Save, ...]] = {
    "explicit": ("kv", "latent"),  # the first is what save="auto" means; explicit gathers no latent to keep
    "absorbed": ("latent", "gathered"),  # the latent *is* its K and V
    "laga": ("latent", "gathered", "kv"),
}


@dataclass(frozen=True, slots=True)
class LatentDims:
    """Sizes of one MLA attention, with the names of HF and DeepSeek configurations."""

    num_heads: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    kv_lora_rank: int

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Width of what LAGA sends per token: the latent and the shared rotated key part."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def kv_head_dim(self) -> int:
        """Width of one head's K and V side by side: what the explicit scheme sends per token and head."""
        return self.qk_head_dim + self.v_head_dim

    @property
    def up_head_dim(self) -> int:
        """Rows of `kv_b_proj.weight` per head."""
        return self.qk_nope_head_dim + self.v_head_dim


@dataclass(frozen=True, slots=True, eq=False)
class AttentionPlan:
    """What a scheme needs to know to run on this rank."""

    scheme: Scheme
    save: Save
    ulysses_degree: int
    rank: int
    dims: LatentDims
    routing: Routing
    kernel: Kernel
    softmax_scale: float
    head_group: int
    return_lse: bool
    keeps: bool  # whether a gradient will be asked for

    @property
    def heads(self) -> slice:
        """The heads that this rank attends with."""
        return heads_of(self.rank, self.ulysses_degree, self.dims.num_heads)

    def heads_of(self, rank: int) -> slice:
        return heads_of(rank, self.ulysses_degree, self.dims.num_heads)

    @property
    def streams(self) -> bool:
        return streams(self.scheme, self.save, self.kernel, self.dims)

    @property
    def num_own_heads(self) -> int:
        return self.dims.num_heads // self.ulysses_degree

    def own_head_groups(self) -> list[slice]:
        """The rank's own heads in groups that are rebuilt together, counted from its first head."""
        return self._groups(self.num_own_heads)

    def all_head_groups(self) -> list[slice]:
        """All heads of the model in groups of the same size."""
        return self._groups(self.dims.num_heads)

    def _groups(self, heads: int) -> list[slice]:
        return [slice(first, min(first + self.head_group, heads)) for first in range(0, heads, self.head_group)]


def streams(scheme: Scheme, save: Save, kernel: Kernel, dims: LatentDims) -> bool:
    """Whether the kernel rebuilds K and V by itself, a few rows at a time; to be kept they must be whole."""
    return scheme == "laga" and save != "kv" and kernel.rebuilds(dims.kv_lora_rank)


def routing_of(
    scheme: Scheme, ulysses_degree: int, layout: SequenceLayout, cp: ContextParallel, causal: bool, window: int | None
) -> Routing:
    """The movement that a scheme needs. The same arguments give the same object."""
    own_keys_apart = scheme == "laga" and ulysses_degree == 1 and cp.size > 1 and window is None
    two_level = scheme != "explicit" and cp.two_level
    return route_tokens(layout, cp.rank, ulysses_degree, causal, window, own_keys_apart, two_level)
