"""`with_laga`: the one line in a Megatron-Core layer spec."""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any, TypeVar

from megatron.core.transformer.multi_latent_attention import MultiLatentAttention
from megatron.core.transformer.spec_utils import ModuleSpec, get_module

from laga_attn.integrations.megatron.core_attention import LatentCoreAttention
from laga_attn.integrations.megatron.layer import LATENT_LAYERS, LatentMLAMixin
from laga_attn.integrations.megatron.options import LatentOptions, UlyssesDegree

__all__ = ["with_laga"]

Spec = TypeVar("Spec")


def with_laga(spec: Spec, *, scheme: str = "laga", ulysses_degree: UlyssesDegree = "auto", save: str = "auto") -> Spec:
    """The same spec with latents on the wire in every MLA self-attention layer that it describes.

        spec = laga.megatron.with_laga(get_gpt_layer_local_spec(multi_latent_attention=True), scheme="laga")

    Parameters, their names and checkpoints are those of the stock layers. To give layers different schemes, apply
    it to the single layers of a block spec.

    Args:
        spec: of an attention layer, a transformer layer, a block, or MTP layers; it is not changed. Layers that
            have LAGA already get the new options.
        scheme: `"laga"`, `"explicit"`, `"absorbed"` or `"auto"`.
        ulysses_degree: context-parallel ranks that exchange heads; `"auto"` chooses the cheapest for the scheme, by
            the rule of `laga_attn.auto`.
        save: what is kept for backward, as for `laga_attn.latent_attention`.

    Raises:
        ValueError: no MLA layer in the spec, a kind of MLA layer that is not supported, or options that do not exist.
            Options of Megatron's that cannot work raise it when a layer is built.
    """
    replaced: list[str] = []
    new: Spec = _walk(spec, LatentOptions(scheme, ulysses_degree, save), replaced)
    if not replaced:
        raise ValueError(
            f"no MLA layer in this spec ({type(spec).__name__}); build it with multi_latent_attention=True, e.g. "
            "get_gpt_layer_with_transformer_engine_spec(multi_latent_attention=True)"
        )
    return new


def _walk(node: Any, options: LatentOptions, replaced: list[str]) -> Any:
    """`node` with every attention spec in it replaced: a copy where something in it changes, else `node` itself."""
    if isinstance(node, ModuleSpec) and _is_mla(node):
        replaced.append(get_module(node).__name__)
        return _replace(node, options)
    if isinstance(node, (list, tuple)):
        items = [_walk(item, options, replaced) for item in node]
        changed = any(new is not old for new, old in zip(items, node, strict=True))
        return type(node)(items) if changed else node
    if isinstance(node, functools.partial):
        keywords = {name: _walk(value, options, replaced) for name, value in node.keywords.items()}
        changed = any(keywords[name] is not value for name, value in node.keywords.items())
        return functools.partial(node.func, *node.args, **keywords) if changed else node
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        before = {field.name: getattr(node, field.name) for field in dataclasses.fields(node)}
        after = {name: _walk(value, options, replaced) for name, value in before.items()}
        changes = {name: value for name, value in after.items() if value is not before[name]}
        new = copy.copy(node) if changes else node
        for name, value in changes.items():
            setattr(new, name, value)
        return new
    return node


def _is_mla(spec: ModuleSpec) -> bool:
    module = get_module(spec)
    return isinstance(module, type) and issubclass(module, MultiLatentAttention)


def _replace(spec: Any, options: LatentOptions) -> Any:
    stock = get_module(spec)
    reference = spec.submodules.core_attention
    if issubclass(stock, LatentMLAMixin):
        latent, reference = stock, reference.params["reference"]
    elif stock in LATENT_LAYERS:
        latent = LATENT_LAYERS[stock]
    else:
        supported = ", ".join(layer.__name__ for layer in LATENT_LAYERS)
        raise ValueError(
            f"{stock.__name__} may compute more than plain MLA; latent attention can replace {supported}. Leave layers "
            "of this class out of the spec that with_laga gets"
        )
    core = ModuleSpec(module=LatentCoreAttention, params={"options": options, "reference": reference})
    new = copy.copy(spec)
    new.module, new.submodules = latent, copy.copy(spec.submodules)
    new.submodules.core_attention = core
    return new
