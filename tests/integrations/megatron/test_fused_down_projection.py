"""One down-projection for query and latent, as the layer for `mla_down_proj_fusion` has from Megatron-Core 0.17."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor

from laga_attn.integrations.megatron import with_laga
from laga_attn.integrations.megatron.features import FUSED_ATTENTION, process_groups
from laga_attn.integrations.megatron.layer import LATENT_LAYERS, LatentMLAMixin
from tests.compare import assert_close
from tests.integrations.megatron.models import (
    Batch,
    Model,
    build,
    finish_gradients,
    forward_backward,
    gather,
    spec_of,
    step_of,
    wrap,
)
from tests.integrations.megatron.world import Parallel, megatron_ranks

BATCH = Batch(rows=2, lengths=(32,))


class OneDownProjection(MLASelfAttention):
    """Stands in for Megatron's layer where a release has none: the same interface, split over TP in the same way."""

    def __init__(self, config: Any, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        del self.linear_q_down_proj, self.linear_kv_down_proj
        self.linear_qkv_down_proj = ColumnParallelLinear(
            config.hidden_size, config.q_lora_rank + config.kv_lora_rank + config.qk_pos_emb_head_dim,
            config=config, init_method=config.init_method, bias=False, gather_output=False, skip_bias_add=False,
        )  # fmt: skip

    def _qkv_down_projection(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        both, group = self.linear_qkv_down_proj(hidden_states)[0], process_groups(self).tp
        width = self.config.q_lora_rank // group.size()
        q = mappings.gather_from_tensor_model_parallel_region(both[..., :width], group=group)
        if self.config.sequence_parallel:
            q = mappings.scatter_to_sequence_parallel_region(q, group=group)
        return q, both[..., width:]


class LatentOneDownProjection(LatentMLAMixin, OneDownProjection):
    """What `with_laga` would make of it."""


LAYERS = [OneDownProjection] if FUSED_ATTENTION is None else [OneDownProjection, FUSED_ATTENTION]


def separate_step(ctx, model: Model):
    with megatron_ranks(Parallel()):
        return step_of(model, BATCH, Parallel())


def fused_step(ctx, layer: type, model: Model, parallel: Parallel):
    """A step with one down-projection, made from the weights of the two; its gradient is taken apart again."""
    with megatron_ranks(parallel), mock.patch.dict(LATENT_LAYERS, {OneDownProjection: LatentOneDownProjection}):
        spec = spec_of(model.with_(scheme=None))
        spec.submodules.self_attention.module = layer
        spec.submodules.self_attention.submodules.linear_qkv_down_proj = ColumnParallelLinear
        fused = build(model, parallel, with_laga(spec, scheme=model.scheme))
        fused.load_state_dict(with_one_down_projection(build(model, parallel).state_dict()))
        ddp = wrap(fused)
        ddp.zero_grad_buffer()
        logits, share, local = forward_backward(ddp, BATCH, parallel)
        finish_gradients(ddp, parallel)
        step = gather(ddp, logits, share, local, parallel)
        for name in [name for name in step.grads if "linear_qkv_down_proj" in name]:
            # On every rank its share of the query's rows, then its share of the latent's.
            both = step.grads.pop(name).unflatten(0, (parallel.tp, -1))
            q_rows = model.q_lora_rank // parallel.tp
            for part, kind in ((both[:, :q_rows], "q"), (both[:, q_rows:], "kv")):
                step.grads[name.replace("qkv_down", f"{kind}_down")] = part.flatten(0, 1)
        return step


def with_one_down_projection(state: dict[str, Tensor]) -> dict[str, Tensor]:
    for name in [name for name in state if name.endswith("linear_q_down_proj.weight")]:
        q, kv = state.pop(name), state.pop(name.replace("q_down", "kv_down"))
        state[name.replace("q_down", "qkv_down")] = torch.cat([q, kv])
    return {name: value for name, value in state.items() if "down_proj._extra_state" not in name}


@pytest.mark.parametrize(
    "parallel", [Parallel(cp=2), Parallel(tp=2, cp=2), Parallel(tp=2, cp=2, sequence_parallel=True)], ids=str
)
@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.__name__)
def test_one_down_projection_equals_two_of_the_stock_model(ranks, layer, parallel):
    actual = ranks(4).run(fused_step, layer, Model(), parallel)[0]
    expected = ranks(4).run(separate_step, Model(scheme=None))[0]
    assert_close(actual.logits, expected.logits, rel=1e-5, name="logits")
    assert_close(actual.loss, expected.loss, rel=1e-5, name="loss")
    assert actual.grads.keys() == expected.grads.keys()
    for name, grad in expected.grads.items():
        assert_close(actual.grads[name], grad, rel=1e-5, name=name)
