"""Context parallelism for the MLA models of Hugging Face Transformers.

`parallelize` leaves modules, parameters and state dict alone and changes three things on the instance:

* `expand_kv` of every attention module, which turns latents into the keys and values of all heads, hands the
  latents through;
* `config._attn_implementation` selects an attention function that receives those latents and calls
  `laga_attn.latent_attention` with `kv_b_proj.weight`;
* forward pre-hooks supply the layout and its positions and refuse what is wrong on a split sequence.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

try:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
except ImportError as error:
    raise ImportError(
        "laga_attn.integrations.transformers needs Transformers 5.24 or newer: pip install 'laga-attn[train]'"
    ) from error

from laga_attn.agreement import agree
from laga_attn.attention import latent_attention
from laga_attn.grid import ContextParallel
from laga_attn.integrations.transformers_models import check_model_type, support_table
from laga_attn.kernels import KernelName
from laga_attn.layout import SequenceLayout

__all__ = ["ATTENTION_NAME", "ParallelizedModel", "parallelize", "support_table"]

ATTENTION_NAME = "laga"
"""Name of the attention function in Transformers' registry, and of `config._attn_implementation`."""

Arguments = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Options:
    """The arguments of one `parallelize` call that every attention call needs."""

    cp: ContextParallel
    scheme: str
    save: str
    kernel: KernelName
    head_group: int | None


class _Config(Protocol):
    _attn_implementation: str | None
    model_type: str


class _Attention(Protocol):
    """What an MLA attention module of Transformers looks like."""

    config: _Config
    kv_b_proj: nn.Module
    kv_lora_rank: int
    qk_nope_head_dim: int
    v_head_dim: int
    _laga_options: _Options


@dataclass(slots=True)
class ParallelizedModel:
    """What `parallelize` changed, so that it can be undone.

    `layers` is the number of attention modules that run context-parallel.
    """

    layers: int
    _configs: list[tuple[_Config, str | None]]
    _modules: list[nn.Module]
    _hooks: list[RemovableHandle] = field(default_factory=list)

    def undo(self) -> None:
        """Restore the model to what it was; doing so twice is harmless."""
        for hook in self._hooks:
            hook.remove()
        for module in self._modules:
            module.__dict__.pop("expand_kv", None)
            module.__dict__.pop("_laga_options", None)
        for config, implementation in self._configs:
            config._attn_implementation = implementation
        self._hooks, self._modules, self._configs = [], [], []


def parallelize(
    model: nn.Module,
    *,
    cp: ContextParallel,
    scheme: str = "laga",
    save: str = "auto",
    kernel: KernelName = "auto",
    head_group: int | None = None,
) -> ParallelizedModel:
    """Let an MLA model of Transformers run on sequences that are split over the ranks of `cp`.

    Call the model with this rank's tokens, and with the layout that split them:

        layout = SequenceLayout.zigzag(tokens.shape[1], cp.size)      # or .packed(cu_seqlens, cp.size)
        shard = layout.shard_lm(tokens, cp.rank)
        logits = model(shard.input_ids, layout=layout).logits         # [B, local_len, vocab], this rank's rows

    Without `layout=` the tokens are taken as zigzag shards of one sequence of P * local length without pads.
    `position_ids` come from the layout. Parameters and state dict stay as they are; gradients of parameters are
    this rank's part of a sum over the ranks (see `laga_attn.gradients`).

    Args:
        model: a supported model (see `support_table`), its decoder alone, or a wrapper around it (PEFT, DDP);
            wrappers may also be added later. LoRA works on every projection, `kv_b_proj` included.
        cp: the ranks that share a sequence.
        scheme, save, kernel, head_group: as for `laga_attn.latent_attention`.

    Returns:
        A handle whose `undo()` restores the model.

    Raises:
        ValueError: a model without MLA or of a type that is not supported, Transformers classes that are too old,
            a model that is parallelized already, attention dropout. Calls of the model raise it for padding
            masks, KV caches, labels that are not shifted yet, and inputs that do not fit the layout.
    """
    outer = _find_model(model)
    modules = _find_attention(outer)
    check_model_type(outer.config.model_type)
    if type(outer).__name__.endswith("ForSequenceClassification"):
        raise ValueError(f"{type(outer).__name__} reads the last token of a sequence, which one rank alone holds")
    if any(hasattr(module, "_laga_options") for module in modules):
        raise ValueError("the model is parallelized already; call undo() on the handle of that call first")
    for module in modules:
        _check_projection(module.kv_b_proj)

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _no_mask)
    configs = {id(owner.config): owner.config for owner in (outer, *modules)}
    handle = ParallelizedModel(
        layers=len(modules),
        _configs=[(config, config._attn_implementation) for config in configs.values()],
        _modules=[cast(nn.Module, module) for module in modules],
    )
    options = _Options(cp, scheme, save, kernel, head_group)
    for config in configs.values():
        config._attn_implementation = ATTENTION_NAME
    for module in modules:
        module._laga_options = options
        module.expand_kv = partial(_hand_through, module.config)  # type: ignore[attr-defined]
    handle._hooks.extend(_install_hooks(outer, options))
    return handle


def _find_model(model: nn.Module) -> Any:
    """The outermost Transformers model, which may sit inside wrappers such as PEFT, DDP or a compiled module."""
    for module in model.modules():
        # Asked of the class: wrappers pass unknown attributes of the instance on to what they wrap.
        if hasattr(type(module), "base_model_prefix"):
            return module
    raise ValueError(f"{type(model).__name__} contains no model of Hugging Face Transformers")


def _find_attention(model: nn.Module) -> list[_Attention]:
    """All MLA modules of the model."""
    latent = [module for module in model.modules() if hasattr(module, "kv_b_proj")]
    if not latent:
        raise ValueError(f"{type(model).__name__} has no MLA attention (modules with a kv_b_proj)")
    needed = ("expand_kv", "kv_a_layernorm", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "config")
    for module in latent:
        if missing := [name for name in needed if not hasattr(module, name)]:
            raise ValueError(
                f"{type(module).__name__} has a kv_b_proj but no {', '.join(missing)}; MLA models need the classes "
                "of Transformers 5.24 or newer: upgrade, and load without trust_remote_code=True"
            )
    return [cast(_Attention, module) for module in latent]


def _hand_through(config: _Config, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
    """Stands in for `expand_kv`: `[B, 1, s, kv_lora_rank]` and `[B, 1, s, rope]` go on as key and value."""
    if config._attn_implementation != ATTENTION_NAME:
        raise ValueError(
            f"the attention implementation was changed to {config._attn_implementation!r} on a parallelized model; "
            "call undo() on the handle of parallelize() first"
        )
    return kv_nope, k_rot


def _no_mask(*args: object, **kwargs: object) -> None:
    """Registered for our attention: what a token sees follows from the layout, no mask is ever built."""


def _attend(
    module: _Attention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    layout: SequenceLayout | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """The attention function that Transformers calls.

    `query [B, H, s, nope + rope]`, `key [B, 1, s, kv_lora_rank]` (the latent), `value [B, 1, s, rope]` (the shared
    key part); returns `[B, s, H, v]` and no attention weights.
    """
    options: _Options | None = getattr(module, "_laga_options", None)
    if options is None or layout is None:
        raise ValueError(
            f"{type(module).__name__} was called with attention {ATTENTION_NAME!r} but not through a parallelized "
            "model: call the model that was given to parallelize(), and give other models a config of their own"
        )
    extra = ("sliding_window", "softcap", "s_aux", "position_bias", "indices")
    if unknown := [name for name in extra if kwargs.get(name) is not None]:
        raise ValueError(f"{type(module).__name__} asks attention for {', '.join(unknown)}, which is not supported")
    if attention_mask is not None or dropout > 0:
        what = f"attention dropout {dropout}" if dropout > 0 else "an attention mask"
        raise ValueError(f"{what} is not supported; set attention_dropout to 0 and describe documents by a layout")
    latent, weight = _latent_and_weight(module.kv_b_proj, key.squeeze(1))
    out = latent_attention(
        query.transpose(1, 2),
        latent,
        value.squeeze(1),
        weight,
        layout=layout,
        cp=options.cp,
        scheme=options.scheme,
        qk_nope_head_dim=module.qk_nope_head_dim,
        v_head_dim=module.v_head_dim,
        softmax_scale=scaling,
        save=options.save,
        kernel=options.kernel,
        head_group=options.head_group,
    )
    return out, None


def _check_projection(projection: nn.Module) -> None:
    """Refuse a `kv_b_proj` whose output is not latent @ weight.T, or that plus plain LoRA."""
    base = getattr(projection, "base_layer", projection)
    if not isinstance(base, nn.Linear) or base.bias is not None or not base.weight.is_floating_point():
        raise ValueError(
            f"kv_b_proj must be a plain nn.Linear without bias, or LoRA on one; got {type(base).__name__} with weight "
            f"dtype {getattr(base.weight, 'dtype', None)}; leave kv_b_proj out of quantization and of other adapters"
        )
    if base is not projection and (not hasattr(projection, "lora_A") or hasattr(projection, "lora_E")):
        raise ValueError(
            f"kv_b_proj is wrapped in {type(projection).__module__}.{type(projection).__name__}; only plain LoRA works "
            "there, other adapters can go on every other projection"
        )
    for name in _active_adapters(projection):
        if name in getattr(projection, "lora_variant", {}):
            variant = type(projection.lora_variant[name]).__name__
            raise ValueError(f"adapter {name!r} on kv_b_proj is {variant}; only plain LoRA works there (no DoRA)")


def _active_adapters(projection: Any) -> list[str]:
    """Names of the LoRA adapters that a projection would apply now, as its own forward decides it."""
    if not hasattr(projection, "lora_A"):
        return []
    if projection.disable_adapters:
        if projection.merged:
            projection.unmerge()
        return []
    return [] if projection.merged else [name for name in projection.active_adapters if name in projection.lora_A]


def _latent_and_weight(projection: Any, latent: Tensor) -> tuple[Tensor, Tensor]:
    """`kv_b_proj` as one matrix: `[B, s, r]` and `[H * (nope + v), r]`, r widened by the ranks of LoRA adapters.

    W c + B A c = [W B] [c; A c]: the low-rank part rides with the latent. Adding B A to W would lose small updates
    when W is bf16, and would leave LoRA dropout out.
    """
    _check_projection(projection)
    weight: Tensor = getattr(projection, "base_layer", projection).weight
    latents, weights = [latent], [weight]
    for name in _active_adapters(projection):
        down, up = projection.lora_A[name], projection.lora_B[name].weight
        low_rank = down(projection.lora_dropout[name](latent.to(down.weight.dtype)))
        latents.append(low_rank.to(latent.dtype))
        weights.append((up * projection.scaling[name]).to(weight.dtype))
    if len(weights) == 1:
        return latent, weight
    return torch.cat(latents, dim=-1), torch.cat(weights, dim=1)


@dataclass(slots=True)
class _Horizon:
    """Last position of the whole sequence `[B or 1, 1]` during a call, for RoPE that depends on the length."""

    last: Tensor | None = None


def _install_hooks(outer: Any, options: _Options) -> Iterator[RemovableHandle]:
    decoder = getattr(outer, outer.base_model_prefix, outer)
    horizon = _Horizon()
    yield decoder.register_forward_pre_hook(partial(_prepare_call, options, horizon), with_kwargs=True)
    if outer is not decoder:
        yield outer.register_forward_pre_hook(_check_labels, with_kwargs=True)
    if "dynamic" in decoder.rotary_emb.rope_type or decoder.rotary_emb.rope_type == "longrope":
        # Their frequencies depend on the largest position, which only one rank holds: show it to all, then cut it.
        yield decoder.rotary_emb.register_forward_pre_hook(partial(_append_last, horizon), with_kwargs=True)
        yield decoder.rotary_emb.register_forward_hook(_drop_last)


def _append_last(
    horizon: _Horizon, rotary: nn.Module, args: tuple[Any, ...], kwargs: Arguments
) -> tuple[tuple[()], Arguments]:
    call = _by_name(rotary, args, kwargs)
    call["position_ids"] = torch.cat([call["position_ids"], horizon.last], dim=-1)
    return (), call


def _drop_last(rotary: nn.Module, args: object, output: Any) -> Any:
    """Cut the appended position from `(cos, sin)`, or from the complex form, each `[B, s + 1, d]`."""
    return output[:, :-1] if isinstance(output, Tensor) else tuple(part[:, :-1] for part in output)


def _by_name(module: nn.Module, args: tuple[Any, ...], kwargs: Arguments) -> Arguments:
    """All arguments of a call of `module` by name."""
    bound = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
    return {**bound.pop("kwargs", {}), **bound}


def _check_labels(outer: nn.Module, args: tuple[Any, ...], kwargs: Arguments) -> None:
    call = _by_name(outer, args, kwargs)
    given = [name for name in ("labels", "shift_labels") if call.get(name) is not None]
    if not given:
        return
    complete = len(given) == 2 and call.get("num_items_in_batch") is not None
    if not complete or not type(outer).__name__.endswith("ForCausalLM"):
        raise ValueError(
            f"{' and '.join(given)} cannot be used like this on a split sequence: the label of a rank's last token "
            "lives elsewhere, and the mean runs over all ranks. Compute the loss from the logits and "
            "layout.shard_lm(tokens, rank).labels (see laga_attn.gradients.token_mean_loss); or give a causal LM "
            "labels=, shift_labels= (both shard_lm's labels) and num_items_in_batch= (valid tokens of all ranks)"
        )


def _prepare_call(
    options: _Options, horizon: _Horizon, decoder: nn.Module, args: tuple[Any, ...], kwargs: Arguments
) -> tuple[tuple[Any, ...], Arguments]:
    """Check a call of the decoder and fill in layout and positions."""
    call = _by_name(decoder, args, kwargs)
    cp, layout = options.cp, call.get("layout")
    tokens = call.get("inputs_embeds") if call.get("input_ids") is None else call["input_ids"]
    if tokens is None:
        return args, kwargs  # the model itself asks for them
    if layout is None:
        layout = SequenceLayout.zigzag(tokens.shape[1] * cp.size, cp.size)
    error = next(_faults(call, layout, cp, tokens), None)
    agree(cp, {"layout": layout, "shape of the tokens": tuple(tokens.shape)}, error)

    expected = layout.positions(cp.rank, tokens.device)[None]  # [1, s]
    positions = expected if call.get("position_ids") is None else call["position_ids"]
    horizon.last = positions[:, :1] - expected[:, :1] + (max(layout.lengths) - 1)
    return (), {**call, "layout": layout, "position_ids": positions, "use_cache": False}


def _faults(call: Arguments, layout: SequenceLayout, cp: ContextParallel, tokens: Tensor) -> Iterator[str]:
    """What is wrong with a call of the decoder."""
    if call.get("attention_mask") is not None:
        yield (
            "attention_mask is not supported on a split sequence; leave padding out: pack the documents and pass "
            "layout=SequenceLayout.packed(cu_seqlens, cp_size), which pads by itself where it must"
        )
    if call.get("use_cache") or call.get("cache") is not None or call.get("past_key_values") is not None:
        yield "KV caches (use_cache=True, generate) are not supported yet; call undo() before generating"
    packed = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")
    if given := [name for name in packed if call.get(name) is not None]:
        yield f"{', '.join(given)}: pass layout=SequenceLayout.packed(cu_seqlens, cp_size) to describe documents instead"
    if call.get("output_attentions"):
        yield "output_attentions=True is not supported: attention weights are never materialised"
    if call.get("is_causal") is False:
        yield "is_causal=False is not supported"
    if layout.cp_size != cp.size:
        yield f"the layout is for {layout.cp_size} ranks, but the model was parallelized over {cp.size}"
    elif layout.local_len != tokens.shape[1]:
        yield (
            f"the model got {tokens.shape[1]} tokens, but this layout gives each of {cp.size} ranks "
            f"{layout.local_len}; shard them with layout.shard_lm or layout.shard"
            if call.get("layout") is not None
            else f"{tokens.shape[1]} tokens on each of {cp.size} ranks are no zigzag shards of one sequence (their "
            f"number must be even); pass the layout= that split them"
        )
    elif call.get("position_ids") is not None:
        yield from _position_faults(call, layout.positions(cp.rank, tokens.device))


def _position_faults(call: Arguments, expected: Tensor) -> Iterator[str]:
    """`position_ids` must be the layout's; without a layout they may start elsewhere than at 0."""
    given: Tensor = call["position_ids"]
    if given.ndim != 2 or given.shape[1] != expected.shape[0]:
        yield f"position_ids must have shape [B, {expected.shape[0]}], got {list(given.shape)}"
        return
    offset = given - expected
    if call.get("layout") is not None and bool(offset.any()):
        yield (
            "position_ids differ from the positions of the layout; pass one of the two "
            "(layout.positions(rank) gives the same numbers)"
        )
    elif bool((offset != offset[:, :1]).any()):
        yield (
            "position_ids are not those of zigzag shards of one sequence, which is what is assumed without a "
            "layout; pass the layout= that split the tokens (SequenceLayout.packed for documents)"
        )
