"""Calls of a Transformers model on a split sequence: what is filled in and what is refused."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from laga_attn.agreement import agree
from laga_attn.grid import ContextParallel
from laga_attn.integrations.transformers_generate import GenerationCache, finish_call
from laga_attn.layout import SequenceLayout

__all__ = ["install_hooks"]

Arguments = dict[str, Any]


@dataclass(slots=True)
class _Call:
    """What the hooks of one call of the model hand on.

    Attributes:
        last: `[B or 1, 1]` last position of the longest document over all ranks.
        error: what is wrong with the outer model's arguments. The decoder's hook raises it, on all ranks: raised at
            once, it would leave ranks whose call is right waiting for this one.
    """

    last: Tensor | None = None
    error: str | None = None


def install_hooks(outer: Any, cp: ContextParallel) -> list[RemovableHandle]:
    """Forward hooks on a Transformers model, its decoder and its rotary embedding."""
    decoder = getattr(outer, outer.base_model_prefix, outer)
    state = _Call()
    hooks = [decoder.register_forward_pre_hook(partial(_prepare_call, cp, state), with_kwargs=True)]
    if outer is not decoder:
        hooks.append(outer.register_forward_pre_hook(partial(_look_at_call, state), with_kwargs=True))
    hooks.append(decoder.register_forward_hook(finish_call, with_kwargs=True))
    rotary = decoder.rotary_emb
    if "dynamic" in rotary.rope_type or rotary.rope_type == "longrope":
        # Frequencies follow the largest position, which one rank alone holds: show it to all, then cut it.
        hooks.append(rotary.register_forward_pre_hook(partial(_append_last, state), with_kwargs=True))
        hooks.append(rotary.register_forward_hook(_drop_last))
    return hooks


def _by_name(module: nn.Module, args: tuple[Any, ...], kwargs: Arguments) -> Arguments:
    """All arguments of a call of `module`, by name."""
    bound = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
    return {**bound.pop("kwargs", {}), **bound}


def _append_last(
    state: _Call, rotary: nn.Module, args: tuple[Any, ...], kwargs: Arguments
) -> tuple[tuple[()], Arguments]:
    call = _by_name(rotary, args, kwargs)
    assert state.last is not None  # the decoder's hook ran before
    call["position_ids"] = torch.cat([call["position_ids"], state.last], dim=-1)
    return (), call


def _drop_last(rotary: nn.Module, args: object, output: Any) -> Any:
    """Cut the appended position off `(cos, sin)`, or off their complex form, each `[B, s + 1, d]`."""
    return output[:, :-1] if isinstance(output, Tensor) else tuple(part[:, :-1] for part in output)


def _look_at_call(state: _Call, outer: nn.Module, args: tuple[Any, ...], kwargs: Arguments) -> None:
    """Note what is wrong with a call of the outer model, and how many logits it wants."""
    call = _by_name(outer, args, kwargs)
    keep = call.get("logits_to_keep")
    cache = _cache_of(call)
    faults = [*_label_faults(outer, call)]
    if isinstance(cache, GenerationCache):
        # So that no more hidden states are sent; a tensor picks some of all.
        cache.last_columns = keep if isinstance(keep, int) and keep > 0 else None
    elif isinstance(keep, Tensor) or keep:
        faults.append(
            "logits_to_keep counts from the end of the sequence, which one rank alone has, but would be applied to "
            "each rank's part; leave it out, and pick rows of the logits by layout.rows(rank)"
        )
    state.error = faults[0] if faults else None


def _cache_of(call: Arguments) -> object:
    return call.get("past_key_values") if call.get("cache") is None else call["cache"]


def _label_faults(outer: nn.Module, call: Arguments) -> Iterator[str]:
    given = [name for name in ("labels", "shift_labels") if call.get(name) is not None]
    whole = len(given) == 2 and call.get("num_items_in_batch") is not None
    if given and not (whole and type(outer).__name__.endswith("ForCausalLM")):
        yield (
            f"{' and '.join(given)} cannot be used like this on a split sequence: the label of a rank's last "
            "token lives on another rank, and the mean runs over all ranks. Compute the loss from the logits "
            "with the labels of layout.shard_lm and laga_attn.gradients.token_mean_loss; or give a causal LM "
            "labels=, shift_labels= (both those of shard_lm) and num_items_in_batch= (tokens of all ranks)"
        )


def _prepare_call(
    cp: ContextParallel, state: _Call, decoder: nn.Module, args: tuple[Any, ...], kwargs: Arguments
) -> tuple[tuple[Any, ...], Arguments]:
    """Check a call of the decoder, then fill in the layout and the positions."""
    call = _by_name(decoder, args, kwargs)
    tokens = call.get("inputs_embeds") if call.get("input_ids") is None else call["input_ids"]
    if tokens is None:
        return args, kwargs  # the model asks for them itself
    error, state.error = state.error, None
    cache = _cache_of(call)
    if isinstance(cache, GenerationCache):
        call, state.last = cache.begin(call, tokens, cp, error)
        return (), call
    layout: SequenceLayout | None = call.get("layout")
    if layout is None:
        layout = SequenceLayout.zigzag(tokens.shape[1] * cp.size, cp.size)
    error = error or next(_faults(call, layout, cp, tokens), None)
    agree(cp, {"layout": layout, "shape of the tokens": tuple(tokens.shape)}, error)

    expected = layout.positions(cp.rank, tokens.device)[None]  # [1, s]
    positions = expected if call.get("position_ids") is None else call["position_ids"]
    state.last = positions[:, :1] - expected[:, :1] + (max(layout.lengths) - 1)
    return (), {**call, "layout": layout, "position_ids": positions, "use_cache": False}


def _faults(call: Arguments, layout: SequenceLayout, cp: ContextParallel, tokens: Tensor) -> Iterator[str]:
    """What is wrong with a call of the decoder."""
    if call.get("attention_mask") is not None:
        yield (
            "attention_mask is not supported on a split sequence; instead of padding, pack the documents and "
            "pass layout=SequenceLayout.packed(cu_seqlens, cp_size)"
        )
    if call.get("use_cache") or call.get("cache") is not None or call.get("past_key_values") is not None:
        yield (
            "of KV caches (use_cache=True, generate) only those of generation_cache(model, cp=cp) are supported; pass "
            "one as cache"
        )
    packed = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")
    if given := [name for name in packed if call.get(name) is not None]:
        yield f"{', '.join(given)} not supported; pass layout=SequenceLayout.packed(cu_seqlens, cp_size)"
    if call.get("output_attentions"):
        yield "output_attentions=True is not supported: attention weights never exist as a whole"
    if call.get("is_causal") is False:
        yield "is_causal=False is not supported; call laga_attn.latent_attention(causal=False) yourself"
    if layout.cp_size != cp.size:
        yield f"the layout is for {layout.cp_size} ranks, but the model was parallelized over {cp.size}"
    elif layout.local_len != tokens.shape[1] and call.get("layout") is None:
        yield (
            "without a layout the tokens must be zigzag shards of one sequence, of even length, but each of "
            f"{cp.size} ranks has {tokens.shape[1]}; pass the layout= that split them"
        )
    elif layout.local_len != tokens.shape[1]:
        yield (
            f"this layout gives each of {cp.size} ranks {layout.local_len} tokens, but the model got "
            f"{tokens.shape[1]}; split them with layout.shard_lm or layout.shard"
        )
    elif call.get("position_ids") is not None:
        yield from _position_faults(call, layout.positions(cp.rank, tokens.device))


def _position_faults(call: Arguments, expected: Tensor) -> Iterator[str]:
    """`position_ids` must be those of the layout; without a layout they may start elsewhere than at 0."""
    given: Tensor = call["position_ids"]
    if given.ndim != 2 or given.shape[1] != expected.shape[0]:
        yield f"position_ids must have shape [B, {expected.shape[0]}], got {list(given.shape)}"
        return
    offset = given - expected
    if call.get("layout") is not None and bool(offset.any()):
        yield "position_ids differ from layout.positions(rank); pass only one of the two"
    elif bool((offset != offset[:, :1]).any()):
        yield (
            "position_ids are not those of zigzag shards of one sequence, which is assumed without a layout; "
            "pass the layout= that split the tokens (SequenceLayout.packed for documents)"
        )
