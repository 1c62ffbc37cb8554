"""What a call of `latent_attention` must satisfy, and what all ranks must agree on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from laga_attn.attention_plan import SAVE_POLICIES, SCHEMES, LatentDims, Scheme, routing_of
from laga_attn.auto import choose, flops_per_port_byte, legal_degrees
from laga_attn.grid import ContextParallel
from laga_attn.kernels import Kernel, KernelName, kernels_here, select
from laga_attn.layout import SequenceLayout
from laga_attn.prefetch import LatentGather, autocast
from laga_attn.routing import Routing

__all__ = ["Call", "autocast", "check_call", "effective_window"]

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """The arguments of one `latent_attention` call, as given."""

    q: Tensor
    c_kv: Tensor
    k_rope: Tensor
    weight: Tensor
    layout: SequenceLayout
    cp: ContextParallel
    scheme: str
    qk_nope_head_dim: int
    v_head_dim: int
    softmax_scale: float | None
    causal: bool
    window: int | None
    save: str
    kernel: KernelName
    head_group: int | None
    return_lse: bool
    prefetched: LatentGather | None
    own_gather: bool  # whether `prefetched` was started with these latents

    def tensors(self) -> dict[str, Tensor]:
        return {"q": self.q, "c_kv": self.c_kv, "k_rope": self.k_rope, "kv_b_weight": self.weight}

    def dims(self) -> LatentDims:
        return LatentDims(
            num_heads=self.q.shape[2],
            qk_nope_head_dim=self.qk_nope_head_dim,
            qk_rope_head_dim=self.k_rope.shape[-1],
            v_head_dim=self.v_head_dim,
            kv_lora_rank=self.c_kv.shape[-1],
        )

    def resolve(self) -> tuple[Scheme, int]:
        """The scheme and the Ulysses degree to run, `"auto"` decided."""
        degree = self.cp.ulysses_degree
        if self.scheme != "auto":
            return cast(Scheme, self.scheme), degree or 1
        itemsize = self.q.element_size()
        return choose(
            self.dims(), self.layout, batch=self.q.shape[0], causal=self.causal, window=self.window,
            itemsize=itemsize, save=self.save, ulysses_degree=degree,
            flops_per_port_byte=flops_per_port_byte(self.cp.flops_per_port_byte, self.q.device.type, itemsize),
        )  # fmt: skip

    def routing(self) -> Routing:
        """What moves, and which spans are attended to."""
        scheme, degree = self.resolve()
        return routing_of(scheme, degree, self.layout, self.cp, self.causal, self.window)

    def select_kernel(self) -> Kernel:
        """The kernel for the head dims that the scheme attends in."""
        dims, absorbed = self.dims(), self.resolve()[0] == "absorbed"
        return select(
            self.kernel,
            device=self.q.device,
            dtype=self.q.dtype,
            qk_head_dim=dims.latent_dim if absorbed else dims.qk_head_dim,
            v_head_dim=dims.kv_lora_rank if absorbed else dims.v_head_dim,
            window=self.window is not None,
            shared_kv=absorbed,
            lse_gradient=self.return_lse and bool(self.wanted_gradients()),
        )

    def signature(self) -> dict[str, object]:
        """What must be equal on all ranks, by the name that an error shows."""
        shared = {f"shape of {name}": tuple(tensor.shape) for name, tensor in self.tensors().items()}
        return {
            **shared,
            "dtypes": tuple(str(tensor.dtype) for tensor in self.tensors().values()),
            # A rank that skips a gradient skips its collective, and the others would wait for it.
            "wanted gradients": self.wanted_gradients(),
            "layout": self.layout,
            "scheme": self.scheme,
            "ulysses_degree": self.cp.ulysses_degree,
            "two_level": self.cp.two_level,
            "flops_per_port_byte": self.cp.flops_per_port_byte,
            "qk_nope_head_dim": self.qk_nope_head_dim,
            "v_head_dim": self.v_head_dim,
            "softmax_scale": self.softmax_scale,
            "causal": self.causal,
            "window": self.window,
            "save": self.save,
            # "auto" could find another kernel on another machine, whose results differ by rounding.
            "kernels": kernels_here(self.q.device, self.q.dtype) if self.kernel == "auto" else self.kernel,
            "return_lse": self.return_lse,
            "head_group": self.head_group,
            "threads, which choose head_group unless it is given": self._signed_threads(),
            "prefetched": self.prefetched is not None,
        }

    @property
    def threads(self) -> int:
        """That share a head group."""
        return torch.get_num_threads() if self.q.device.type == "cpu" else 1

    def _signed_threads(self) -> int | None:
        """Threads where they choose the head groups by which ranks exchange."""
        exchanged = self.scheme != "explicit" and (self.scheme == "auto" or self.cp.ulysses_degree not in (None, 1))
        return self.threads if self.head_group is None and exchanged else None

    def wanted_gradients(self) -> tuple[str, ...]:
        if not torch.is_grad_enabled():
            return ()
        return tuple(name for name, tensor in self.tensors().items() if tensor.requires_grad)


def effective_window(window: int | None, layout: SequenceLayout) -> int | None:
    """None where the window is as long as every document and so limits nothing."""
    return None if window is not None and window >= max(layout.lengths) else window


def check_call(call: Call) -> str | None:
    """The first thing that is wrong with this rank's arguments, or None."""
    return next((message for check in _CHECKS for message in check(call)), None)


def _check_ranks(call: Call) -> Iterator[str]:
    layout, cp = call.layout, call.cp
    if layout.cp_size != cp.size:
        yield (
            f"the layout is for {layout.cp_size} ranks, but the context-parallel group has {cp.size}; "
            f"build it with cp_size={cp.size}"
        )


def _check_ranks_of_tensors(call: Call) -> Iterator[str]:
    for (name, tensor), ndim, form in zip(
        call.tensors().items(),
        (4, 3, 3, 2),
        ("[B, s, H, nope + rope]", "[B, s, kv_lora_rank]", "[B, s, rope]", "[H * (nope + v), kv_lora_rank]"),
        strict=True,
    ):
        if tensor.ndim != ndim:
            yield f"{name} must have shape {form}, got {list(tensor.shape)}"


def _check_shapes(call: Call) -> Iterator[str]:
    q, c_kv, k_rope, weight = call.tensors().values()
    batch, tokens, heads, width = q.shape
    if tokens != call.layout.local_len:
        yield (
            f"q holds {tokens} tokens, but this layout gives every rank {call.layout.local_len} "
            f"({call.layout.padded_len} padded tokens over {call.layout.cp_size} ranks); "
            "shard inputs with layout.shard"
        )
    for name, tensor in (("c_kv", c_kv), ("k_rope", k_rope)):
        if tensor.shape[:2] != q.shape[:2]:
            yield f"{name} has shape {list(tensor.shape)}, but q has batch {batch} and {tokens} tokens: they must match"
    nope, v, rope = call.qk_nope_head_dim, call.v_head_dim, k_rope.shape[-1]
    if min(nope, v, rope, heads, c_kv.shape[-1]) < 1:
        yield (
            f"head sizes must be positive: qk_nope_head_dim={nope}, v_head_dim={v}, qk_rope_head_dim={rope}, "
            f"{heads} heads, kv_lora_rank={c_kv.shape[-1]}"
        )
    if width != nope + rope:
        yield (
            f"q has head width {width}, but qk_nope_head_dim {nope} + the {rope} of k_rope = {nope + rope}; "
            "pass the rotated query with its nope part first"
        )
    if tuple(weight.shape) != (heads * (nope + v), c_kv.shape[-1]):
        yield (
            f"kv_b_weight has shape {list(weight.shape)}, but {heads} heads of {nope} + {v} rows over a latent of "
            f"width {c_kv.shape[-1]} need [{heads * (nope + v)}, {c_kv.shape[-1]}]"
        )
    if len(call.layout.lengths) > 1 and batch != 1:
        yield (
            f"a packed layout ({len(call.layout.lengths)} documents) needs batch size 1, got {batch}; "
            "merge the rows into one pack: concatenate the tokens and chain their cu_seqlens"
        )


def _check_kinds(call: Call) -> Iterator[str]:
    dtypes = {name: tensor.dtype for name, tensor in call.tensors().items()}
    if len(set(dtypes.values())) > 1 or call.q.dtype not in _DTYPES:
        found = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
        yield f"all tensors need one dtype out of float64, float32, bfloat16 and float16, got {found}"
    devices = {name: tensor.device for name, tensor in call.tensors().items()}
    if len(set(devices.values())) > 1:
        yield f"all tensors must be on one device, got {', '.join(f'{n} on {d}' for n, d in devices.items())}"
    for name, tensor in call.tensors().items():
        if type(tensor).__name__ == "DTensor":
            yield f"{name} is a DTensor; pass a plain tensor: to_local(), or full_tensor() of a sharded weight"


def _check_options(call: Call) -> Iterator[str]:
    schemes = (*SCHEMES, "auto")
    if call.scheme not in schemes:
        yield f"unknown scheme {call.scheme!r}; choose one of {', '.join(schemes)}"
        return
    policies = ("auto", *SAVE_POLICIES[call.scheme if call.scheme != "auto" else "laga"])
    if call.scheme == "auto":
        policies = ("auto", "latent")  # what every scheme can do
    if call.save not in policies:
        yield f"save={call.save!r} is not possible with scheme {call.scheme!r}; choose one of {', '.join(policies)}"
    if call.scheme == "explicit" and call.cp.two_level:
        yield "two_level=True gathers latents, of which scheme 'explicit' sends none; use another, or two_level=False"
    if call.window is not None and (call.window < 1 or not call.causal):
        yield f"window={call.window} needs causal=True and at least 1 token (itself); got causal={call.causal}"
    if call.softmax_scale is not None and not call.softmax_scale > 0:
        yield f"softmax_scale must be positive, got {call.softmax_scale}; None means 1 / sqrt(qk head dim)"
    if call.head_group is not None and call.head_group < 1:
        yield f"head_group must be at least 1 head, got {call.head_group}; None chooses"


def _check_heads(call: Call) -> Iterator[str]:
    heads, degree = call.q.shape[2], call.cp.ulysses_degree or 1
    if heads % degree:
        yield (
            f"{heads} heads cannot be divided over ulysses_degree={degree}; with {call.cp.size} ranks choose one of "
            f"{', '.join(map(str, legal_degrees(call.cp.size, heads)))}"
        )


def _check_kernel(call: Call) -> Iterator[str]:
    try:
        call.select_kernel()
    except ValueError as error:
        yield str(error)


def _check_prefetched(call: Call) -> Iterator[str]:
    if call.prefetched is None:
        return
    if not call.own_gather:
        yield "prefetched was started with other tensors; pass the c_kv and k_rope that went into prefetch_latent"
    scheme, degree = call.resolve()
    expected = (call.layout, scheme, degree, call.cp.two_level, call.causal, call.window)
    if call.prefetched.options != expected:
        yield (
            "prefetched was started for another layout, scheme, ulysses_degree, causal or window; "
            "pass the same to prefetch_latent and latent_attention"
        )


_CHECKS = (
    _check_ranks, _check_ranks_of_tensors, _check_shapes, _check_kinds, _check_options, _check_heads, _check_kernel,
    _check_prefetched,
)  # fmt: skip
