"""Context parallelism for the MLA models of Hugging Face Transformers.

`parallelize` leaves modules, parameters and state dict alone and changes three things on the instance:

* `expand_kv` of every attention module, which makes the keys and values of all heads from latents, hands the
  latents through;
* `config._attn_implementation` selects an attention function that receives those latents and calls
  `laga_attn.latent_attention` with the weight of `kv_b_proj`;
* forward pre-hooks supply the layout and its positions, and refuse what is wrong on a split sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

try:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
except ImportError as error:
    raise ImportError(
        "laga_attn.integrations.transformers needs Transformers 5.24 or newer: pip install 'laga-attn[train]'"
    ) from error

from laga_attn.attention import latent_attention
from laga_attn.grid import ContextParallel
from laga_attn.integrations.transformers_calls import install_hooks
from laga_attn.integrations.transformers_generate import GenerationCache, GenerationStep, generation_cache
from laga_attn.integrations.transformers_lora import check_projection, latent_and_weight
from laga_attn.integrations.transformers_models import check_model_type, support_table
from laga_attn.kernels import KernelName
from laga_attn.layout import SequenceLayout

__all__ = [
    "ATTENTION_NAME",
    "GenerationCache",
    "ParallelizedModel",
    "generation_cache",
    "parallelize",
    "support_table",
]

ATTENTION_NAME = "laga"
"""Name of the attention function in Transformers' registry, and of `config._attn_implementation`."""


@dataclass(frozen=True, slots=True)
class _Options:
    """What one `parallelize` call asks of `latent_attention`."""

    cp: ContextParallel
    scheme: str
    save: str
    kernel: KernelName
    head_group: int | None


class _Config(Protocol):
    _attn_implementation: str | None


class _Attention(Protocol):
    """An MLA attention module of Transformers."""

    config: _Config
    kv_b_proj: nn.Module
    qk_nope_head_dim: int
    v_head_dim: int


class ParallelizedModel:
    """What `parallelize` changed on a model, so that it can be undone.

    `layers` is the number of attention modules that run context-parallel.
    """

    def __init__(self, modules: list[_Attention], hooks: list[RemovableHandle]) -> None:
        self.layers = len(modules)
        self._modules = modules
        self._hooks = hooks
        configs = {id(module.config): module.config for module in modules}
        self._implementations = [(config, config._attn_implementation) for config in configs.values()]

    def undo(self) -> None:
        """Restore the model to what it was; a second call changes nothing."""
        for hook in self._hooks:
            hook.remove()
        for module in self._modules:
            del module.expand_kv, module._laga_options  # type: ignore[attr-defined]
        for config, implementation in self._implementations:
            config._attn_implementation = implementation
        self._hooks, self._modules, self._implementations = [], [], []


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

    Call the model with this rank's tokens and with the layout that split them:

        layout = SequenceLayout.zigzag(tokens.shape[1], cp.size)      # or .packed(cu_seqlens, cp.size)
        shard = layout.shard_lm(tokens, cp.rank)
        logits = model(shard.input_ids, layout=layout).logits         # [B, local_len, vocab] of this rank

    Without `layout=` the tokens are taken as zigzag shards of one sequence of P * local length, without pads.
    `position_ids` come from the layout. Parameters and state dict stay as they are; gradients of parameters
    are this rank's part of a sum over the ranks, see `laga_attn.gradients`.

    Args:
        model: a model of a supported type (see `support_table`), its decoder alone, or a wrapper around it
            (PEFT, DDP); wrappers may also be added later. LoRA works on all projections.
        cp: the ranks that share a sequence.
        scheme: as for `laga_attn.latent_attention`, like the arguments below.
        save: what is kept for backward.
        kernel: what computes attention on one rank.
        head_group: heads whose K and V are rebuilt at a time.

    Returns:
        A handle whose `undo()` restores the model.

    Raises:
        ValueError: a model without MLA, of a type that is not supported, with classes that are too old, or
            parallelized already. Later calls of the model raise it for padding masks, KV caches, attention
            dropout, labels that are not shifted yet, and inputs or positions that do not fit the layout.
    """
    outer = _find_model(model)
    modules = _find_attention(outer)
    check_model_type(outer.config.model_type)
    if type(outer).__name__.endswith("ForSequenceClassification"):
        raise ValueError(f"{type(outer).__name__} reads the last token, which only one rank has")
    for module in modules:
        check_projection(module.kv_b_proj)
        if hasattr(module, "_laga_options"):
            raise ValueError("the model is parallelized already; call undo() on that handle first")

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _no_mask)
    handle = ParallelizedModel(modules, install_hooks(outer, cp))
    options = _Options(cp, scheme, save, kernel, head_group)
    for module in modules:
        module._laga_options = options  # type: ignore[attr-defined]
        module.expand_kv = partial(_hand_through, module.config)  # type: ignore[attr-defined]
        module.config._attn_implementation = ATTENTION_NAME
    return handle


def _find_model(model: nn.Module) -> Any:
    """The outermost Transformers model, which may sit inside wrappers (PEFT, DDP, a compiled module)."""
    for module in model.modules():
        # Asked of the class: wrappers answer for the instance that they wrap.
        if hasattr(type(module), "base_model_prefix"):
            return module
    raise ValueError(f"{type(model).__name__} contains no model of Hugging Face Transformers")


def _find_attention(model: nn.Module) -> list[_Attention]:
    """All MLA modules of the model."""
    modules = [module for module in model.modules() if hasattr(module, "kv_b_proj")]
    if not modules:
        raise ValueError(f"{type(model).__name__} has no MLA attention: no module with a kv_b_proj")
    for module in modules:
        if not all(hasattr(module, name) for name in ("expand_kv", "qk_nope_head_dim", "v_head_dim")):
            raise ValueError(
                f"{type(module).__name__} has a kv_b_proj but no expand_kv, new in Transformers 5.24; "
                "upgrade, and load the model without trust_remote_code=True"
            )
    return [cast(_Attention, module) for module in modules]


def _hand_through(config: _Config, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
    """Stands in for `expand_kv`: `[B, 1, s, r]` and `[B, 1, s, rope]` pass as key and value."""
    if config._attn_implementation != ATTENTION_NAME:
        raise ValueError(
            f"the attention of a parallelized model was changed to {config._attn_implementation!r}; "
            "call undo() on the handle of parallelize() first"
        )
    return kv_nope, k_rot


def _no_mask(*args: object, **kwargs: object) -> None:
    """The mask for our attention: none is ever built, what a token sees follows from the layout."""


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
    generation: GenerationStep | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """The attention function that Transformers calls: returns `[B, s, H, v]` and no attention weights.

    `query [B, H, s, nope + rope]`; `key [B, 1, s, r]` and `value [B, 1, s, rope]` come from `_hand_through`.
    """
    options: _Options | None = getattr(module, "_laga_options", None)
    if options is None or (layout is None and generation is None):
        raise ValueError(
            f"{type(module).__name__} was called with attention {ATTENTION_NAME!r}, but not through a "
            "parallelized model; call the model itself, and let no other model share its config"
        )
    extras = ("sliding_window", "softcap", "s_aux", "position_bias", "indices")
    asked = [name for name in extras if kwargs.get(name) is not None]
    asked += ["attention_mask"] if attention_mask is not None else []
    asked += [f"attention_dropout={dropout}"] if dropout > 0 else []
    if asked:
        raise ValueError(f"{type(module).__name__} asks for {', '.join(asked)}, which is not supported")
    if generation is not None:
        return generation.attend(module, query, key.squeeze(1), value.squeeze(1), scaling, options.kernel), None
    assert layout is not None
    latent, weight = latent_and_weight(module.kv_b_proj, key.squeeze(1))
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
