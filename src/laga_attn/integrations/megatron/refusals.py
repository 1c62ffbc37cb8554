"""What latent attention cannot do under Megatron, and what it does: one table for errors and documentation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["REFUSALS", "SUPPORTED", "Refusal", "check_config", "support_table"]


@dataclass(frozen=True, slots=True)
class Refusal:
    """An option of `MLATransformerConfig` that is refused when a layer is built."""

    option: str
    is_on: Callable[[Any], bool]
    why: str
    instead: str


def _truthy(option: str) -> Callable[[Any], bool]:
    return lambda config: bool(getattr(config, option, None))


def _offloads_core_attention(config: Any) -> bool:
    modules = getattr(config, "offload_modules", None) or ()
    return bool(getattr(config, "fine_grained_activation_offloading", False)) and "core_attn" in modules


REFUSALS: Final = (
    Refusal(
        "fp8",
        _truthy("fp8"),
        "keys and values are rebuilt from the latent by plain matrix products, which do not run in FP8",
        "train in bf16, or keep the stock layer",
    ),
    Refusal(
        "fp4",
        _truthy("fp4"),
        "keys and values are rebuilt from the latent by plain matrix products, which do not run in FP4",
        "train in bf16, or keep the stock layer",
    ),
    Refusal(
        "cache_mla_latents",
        _truthy("cache_mla_latents"),
        "it belongs to inference with a cache and deletes the up-projection that training needs",
        "use the stock layer for inference: checkpoints fit both",
    ),
    Refusal(
        "attention_dropout",
        _truthy("attention_dropout"),
        "probabilities are never stored, so there is nothing to drop",
        "set attention_dropout=0 (hidden_dropout is free)",
    ),
    Refusal(
        "softmax_type",
        lambda config: getattr(config, "softmax_type", "vanilla") != "vanilla",
        "attention sinks are not part of the scores that are computed here",
        "set softmax_type='vanilla'",
    ),
    Refusal(
        "experimental_attention_variant",
        _truthy("experimental_attention_variant"),
        "sparse attention picks its keys from the whole sequence",
        "leave those layers as they are",
    ),
    Refusal(
        "gtp_weight_remat_size",
        lambda config: getattr(config, "gtp_weight_remat_size", 1) > 1,
        "attention needs the up-projection's weight of its heads whole, and this spreads it over more ranks",
        "leave tensor_parallel_num_weight_shards at tensor_model_parallel_size",
    ),
    Refusal(
        "offload_modules",
        _offloads_core_attention,
        "offloading frees 'core_attn' inputs that backward here still needs",
        "leave 'core_attn' out of offload_modules: what attention keeps is small already",
    ),
)


def check_config(config: Any) -> None:
    """Raise ValueError for the first option that cannot work."""
    for refusal in REFUSALS:
        if refusal.is_on(config):
            raise ValueError(
                f"{refusal.option}={getattr(config, refusal.option)!r} does not work with latent attention: "
                f"{refusal.why}; {refusal.instead}"
            )


SUPPORTED: Final = (
    ("tensor parallelism, with and without `sequence_parallel`", "heads are split as in the stock layer"),
    ("`context_parallel_size`", "any; may exceed the number of heads with `ulysses_degree=1`"),
    ("pipeline parallelism, MTP layers, MoE", "every layer spec by itself"),
    ("`q_lora_rank=None`", "one query projection"),
    ("`rope_type`", "`rope` and `yarn`"),
    ("`apply_rope_fusion`", "queries and the shared key part go through Megatron's fused kernel"),
    ("`qk_layernorm`", "as a module, or fused into the up-projection by Transformer Engine's spec"),
    ("fused query/latent down-projection", "where Megatron-Core has it (from 0.17)"),
    ("`packed_seq_params` (THD)", "with and without padded offsets; zigzag inside every document"),
    ("`window_size`", "`(left, 0)` with causal masks"),
    ("`recompute_granularity`", "`full`; `selective` with `core_attn`, `mla_up_proj` and all others"),
    ("`gradient_accumulation_fusion`, `delay_wgrad_compute`", "the up-projection's gradient is collected by DDP"),
    ("distributed optimizer, `overlap_grad_reduce`, `overlap_param_gather`", "unchanged"),
    ("`dist_checkpointing`", "keys and tensors are those of the stock layer"),
    ("`cp_comm_type`", "None and `p2p` leave the choice free; `all_gather` means `ulysses_degree=1`, `a2a` all ranks"),
    ("`qk_clip`, `log_max_attention_logit`", "costs one more gather of the latent and the scores once more"),
)


def support_table() -> str:
    """The table of the documentation, in Markdown."""
    rows = [f"| {what} | yes | {note} |" for what, note in SUPPORTED]
    rows += [f"| `{r.option}` | no | {r.why}; {r.instead} |" for r in REFUSALS]
    return "\n".join(["| option | supported | notes |", "|---|---|---|", *rows])
