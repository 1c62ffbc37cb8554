"""`verify`: a model with LAGA against stock attention, on the same weights and the same batch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor, nn

from laga_attn.integrations.megatron.features import process_groups, process_groups_argument
from laga_attn.integrations.megatron.layer import LATENT_LAYERS, LatentMLAMixin
from laga_attn.integrations.megatron.up_projection import give_back, take_over

__all__ = ["Verification", "verify"]

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Verification:
    """How far a model is from its reference. `str()` of it is a report.

    Attributes:
        reference: what the reference ran on.
        loss, reference_loss: mean loss over the counted tokens of all context-parallel ranks.
        gradients: for every parameter of this rank, the largest difference of its gradient relative to the largest
            element of the reference's; infinite where it is not finite, or only one of the two has a gradient.
    """

    reference: str
    loss: float
    reference_loss: float
    gradients: Mapping[str, float]

    @property
    def loss_error(self) -> float:
        """Relative to the reference."""
        return abs(self.loss - self.reference_loss) / abs(self.reference_loss)

    @property
    def gradient_error(self) -> float:
        """The largest of `gradients`."""
        return max(self.gradients.values())

    def __str__(self) -> str:
        worst = sorted(self.gradients.items(), key=lambda item: -item[1])[:_SHOWN]
        return "\n".join(
            [
                f"reference: {self.reference}",
                f"loss      {self.loss:.6f}, reference {self.reference_loss:.6f}, relative error {self.loss_error:.1e}",
                f"gradients of {len(self.gradients)} parameters, largest relative errors:",
                *(f"  {error:.1e}  {name}" for name, error in worst),
            ]
        )


def verify(model: nn.Module, batch: Mapping[str, Any], loss_mask: Tensor | None = None) -> Verification:
    """Run forward and backward with stock attention and with LAGA, and compare losses and gradients.

        print(laga.megatron.verify(model, batch))

    The reference is the stock layer with the core attention that `with_laga` replaced. Where that cannot be built
    (Megatron's own takes no MLA heads, and Transformer Engine's needs a GPU) it is LAGA's explicit scheme instead.
    Dropout is off meanwhile. Gradients are cleared before and after, so call it between training steps, on all
    ranks of the model.

    Args:
        model: a GPTModel or the like that was built with `with_laga`, bare or wrapped (DDP, Float16Module).
        batch: this rank's part of a batch: the keyword arguments of `model`, `labels` among them.
        loss_mask: which tokens count, in the shape of the labels; None: all.

    Raises:
        ValueError: no LAGA layer in the model, a stage of a pipeline, or no labels in the batch.
    """
    layers: list[Any] = [module for module in model.modules() if isinstance(module, LatentMLAMixin)]
    if not layers:
        raise ValueError("this model has no LAGA layers; build it from a spec that with_laga returned")
    if batch.get("labels") is None:
        raise ValueError("verify needs batch['labels']: it compares losses and gradients")
    stages = layers[0].config.pipeline_model_parallel_size
    if stages > 1:
        raise ValueError(
            f"verify runs whole models, but this is a stage of pipeline_model_parallel_size={stages}; build the model "
            "with pipeline_model_parallel_size=1 for it, of fewer layers if need be"
        )
    modes = [(module, module.training) for module in model.modules()]
    largest_logits = [layer.core_attention.current_max_attn_logits for layer in layers]
    model.eval()
    try:
        with _reference_layers(layers) as reference:
            reference_loss, expected = _run(model, batch, loss_mask, layers[0])
        loss, actual = _run(model, batch, loss_mask, layers[0])
    finally:
        _clear_gradients(model)
        for module, mode in modes:
            module.training = mode
        for layer, largest in zip(layers, largest_logits, strict=True):
            layer.core_attention.current_max_attn_logits = largest
    errors = {name: _relative_error(actual.get(name), expected.get(name)) for name in {**expected, **actual}}
    return Verification(reference, loss, reference_loss, errors)


@contextmanager
def _reference_layers(layers: list[Any]) -> Iterator[str]:
    """Turn LAGA layers into what they are compared with; gives its name."""
    try:
        cores = [_stock_core(layer) for layer in layers]
    except (AssertionError, ImportError, TypeError, ValueError) as error:
        options = [layer.core_attention.options for layer in layers]
        for layer in layers:
            layer.core_attention.options = replace(layer.core_attention.options, scheme="explicit", save="auto")
        try:
            yield f"LAGA's explicit scheme, because the stock core attention cannot be built here ({error})"
        finally:
            for layer, before in zip(layers, options, strict=True):
                layer.core_attention.options = before
        return
    stock_of = {latent: stock for stock, latent in LATENT_LAYERS.items()}
    latent_parts = [(type(layer), layer.core_attention) for layer in layers]
    for layer, core in zip(layers, cores, strict=True):
        layer.__class__, layer.core_attention = stock_of[type(layer)], core
        give_back(layer.linear_kv_up_proj)
    try:
        yield f"the stock layer with {type(cores[0]).__name__}"
    finally:
        for layer, (latent, core) in zip(layers, latent_parts, strict=True):
            layer.__class__, layer.core_attention = latent, core
            take_over(layer.linear_kv_up_proj)


def _stock_core(layer: Any) -> nn.Module:
    """The core attention that the layer's was put in place of, built as the stock layer builds it."""
    core = layer.core_attention
    stock: nn.Module = build_module(
        core.reference,
        config=layer.config,
        layer_number=layer.layer_number,
        attn_mask_type=core.attn_mask_type,
        attention_type="self",
        softmax_scale=core.softmax_scale,
        k_channels=core.dims.qk_head_dim,
        v_channels=core.dims.v_head_dim,
        cp_comm_type=core.cp_comm_type,
        **process_groups_argument(layer),
    )
    return stock.train(layer.training)


def _run(model: Any, batch: Mapping[str, Any], mask: Tensor | None, layer: Any) -> tuple[float, dict[str, Tensor]]:
    """Mean loss, and every parameter's gradient summed over the context-parallel ranks, on the CPU."""
    groups, sequence_parallel = process_groups(layer), layer.config.sequence_parallel
    _clear_gradients(model)
    with model.no_sync() if hasattr(model, "no_sync") else nullcontext():
        losses: Tensor = model(**batch)  # [b, s]
        weights = torch.ones_like(losses) if mask is None else mask.to(losses.dtype)
        count = weights.sum()
        dist.all_reduce(count, group=groups.cp)
        share = (losses * weights).sum() / count
        torch.autograd.backward(share)
    loss = share.detach().clone()
    dist.all_reduce(loss, group=groups.cp)
    gradients = {}
    for name, parameter in model.named_parameters():
        gradient = _gradient(parameter)
        if gradient is None:
            continue
        if getattr(parameter, "allreduce", True):  # experts of an expert-parallel rank are its own
            dist.all_reduce(gradient, group=groups.cp)
        if sequence_parallel and getattr(parameter, "sequence_parallel", False):
            dist.all_reduce(gradient, group=groups.tp)
        gradients[name] = gradient.cpu()
    return float(loss), gradients


def _gradient(parameter: Any) -> Tensor | None:
    """A copy in fp32 of what backward gave, wherever DDP or a fused kernel has put it."""
    parts = [part for part in (getattr(parameter, "main_grad", None), parameter.grad) if part is not None]
    return torch.stack([part.float() for part in parts]).sum(0) if parts else None


def _clear_gradients(model: nn.Module) -> None:
    parameter: Any
    for parameter in model.parameters():
        parameter.grad = None
        if getattr(parameter, "main_grad", None) is not None:
            parameter.main_grad.zero_()
            parameter.grad_added_to_main_grad = False


def _relative_error(actual: Tensor | None, expected: Tensor | None) -> float:
    if actual is None or expected is None:
        return math.inf
    scale = float(expected.abs().max())
    difference = float((actual - expected).abs().max())
    error = difference / scale if scale > 0 else difference
    return error if math.isfinite(error) else math.inf
