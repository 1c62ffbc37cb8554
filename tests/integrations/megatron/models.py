"""Small GPT models with MLA, stock and with LAGA, and one training step of Megatron's own on them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laga_attn.layout import SequenceLayout
from tests.integrations.megatron.plain_attention import PlainAttention
from tests.integrations.megatron.te_stand_ins import DuplicatedLinear, NormColumnParallelLinear
from tests.integrations.megatron.world import Parallel

__all__ = [
    "Batch",
    "Local",
    "Model",
    "Step",
    "build",
    "config_of",
    "finish_gradients",
    "forward_backward",
    "gather",
    "local_batch",
    "make_batch",
    "spec_of",
    "step_of",
    "whole_parameter",
    "wrap",
]


@dataclass(frozen=True)
class Model:
    """A model and how its attention runs; `scheme=None` is the stock layer (on one context-parallel rank)."""

    scheme: str | None = "laga"
    ulysses_degree: int | str = "auto"
    save: str = "auto"
    rope_type: str = "rope"
    q_lora_rank: int | None = 16
    experts: int | None = None
    layers: int = 2
    te_layers: bool = False  # attention's linears as in Transformer Engine's spec, on stand-ins
    options: dict[str, Any] = field(default_factory=dict)

    def with_(self, **changes: Any) -> Model:
        return replace(self, **changes)


@dataclass(frozen=True)
class Batch:
    """Documents of random tokens; without `packed` one sequence per row, all of the same length."""

    rows: int = 2
    lengths: tuple[int, ...] = (32,)
    packed: bool = False
    slot: int = 8  # documents occupy multiples of this many tokens
    seed: int = 0


VOCABULARY = 64
HEADS = 4


def config_of(model: Model, parallel: Parallel) -> Any:
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    yarn = {"rotary_scaling_factor": 4.0, "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 0.8}
    arguments = {
        "num_layers": model.layers,
        "hidden_size": 32,
        "num_attention_heads": HEADS,
        "kv_channels": 8,
        "ffn_hidden_size": 48,
        "q_lora_rank": model.q_lora_rank,
        "kv_lora_rank": 20,
        "qk_head_dim": 8,
        "qk_pos_emb_head_dim": 8,
        "v_head_dim": 8,
        "rope_type": model.rope_type,
        **(yarn if model.rope_type == "yarn" else {}),
        "qk_layernorm": True,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "init_method_std": 0.3,  # scores of a few units, so that attention is far from uniform
        "use_cpu_initialization": True,
        "transformer_impl": "local",
        "tensor_model_parallel_size": parallel.tp,
        "context_parallel_size": parallel.cp,
        "pipeline_model_parallel_size": parallel.pp,
        "sequence_parallel": parallel.sequence_parallel,
        **({"pipeline_dtype": torch.float32} if parallel.pp > 1 else {}),
    }
    if model.experts:
        arguments |= {
            "num_moe_experts": model.experts,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": 24,
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "alltoall",
        }
    return MLATransformerConfig(**(arguments | model.options))


def spec_of(model: Model) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.identity_op import IdentityOp

    from laga_attn.integrations.megatron import with_laga

    spec = get_gpt_layer_local_spec(
        num_experts=model.experts, multi_latent_attention=True, qk_layernorm=True, normalization="RMSNorm"
    )
    linears = spec.submodules.self_attention.submodules
    if model.q_lora_rank is None:
        linears.q_layernorm = IdentityOp  # there is no query latent to normalise
    if model.te_layers:
        linears.linear_q_down_proj = linears.linear_kv_down_proj = DuplicatedLinear
        linears.linear_q_up_proj = linears.linear_kv_up_proj = NormColumnParallelLinear
        linears.q_layernorm = linears.kv_layernorm = IdentityOp
    if model.scheme is None:
        linears.core_attention = PlainAttention
        return spec
    return with_laga(spec, scheme=model.scheme, ulysses_degree=model.ulysses_degree, save=model.save)


def build(model: Model, parallel: Parallel, spec: Any = None) -> Any:
    """A GPTModel whose weights are the same for every layout."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_model import GPTModel

    torch.manual_seed(1)
    return GPTModel(
        config_of(model, parallel),
        spec_of(model) if spec is None else spec,
        vocab_size=VOCABULARY,
        max_sequence_length=128,
        position_embedding_type="rope",
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
    )


def wrap(gpt: Any, **options: Any) -> Any:
    """The model in Megatron's DDP, which averages gradients over the data- and context-parallel ranks."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    return DistributedDataParallel(gpt.config, DistributedDataParallelConfig(**options), gpt)


@dataclass(frozen=True)
class Local:
    """One rank's part of a batch, and what its tokens are in the whole one."""

    arguments: dict[str, Any]  # of GPTModel.forward, without labels
    labels: Tensor  # [b, s]
    counted: Tensor  # [b, s] bool
    tokens: int  # that count, over all ranks
    rows: Tensor  # [s] index in the whole sequence, -1 for a pad


def make_batch(batch: Batch, cp: int) -> tuple[SequenceLayout, Tensor]:
    g = torch.Generator().manual_seed(batch.seed)
    tokens = torch.randint(VOCABULARY, (1 if batch.packed else batch.rows, sum(batch.lengths)), generator=g)
    offsets = [sum(batch.lengths[:n]) for n in range(len(batch.lengths) + 1)]
    slots = [-(-length // batch.slot) * batch.slot for length in batch.lengths]
    padded = [sum(slots[:n]) for n in range(len(slots) + 1)]
    return SequenceLayout.packed(offsets, cp, cu_seqlens_padded=padded), tokens


def local_batch(batch: Batch, parallel: Parallel) -> Local:
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams

    layout, tokens = make_batch(batch, parallel.cp)
    rank = parallel_state.get_context_parallel_rank()
    shard = layout.shard_lm(tokens, rank, pad_token=3)
    arguments = {"input_ids": shard.input_ids, "position_ids": shard.position_ids, "attention_mask": None}
    if batch.packed:
        real = torch.tensor(layout.cu_seqlens, dtype=torch.int32)
        padded = torch.tensor([0, *layout.padded_lengths], dtype=torch.int32).cumsum(0).to(torch.int32)
        longest = max(layout.padded_lengths)
        arguments["packed_seq_params"] = PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=real, cu_seqlens_kv=real, cu_seqlens_q_padded=padded,
            cu_seqlens_kv_padded=padded, max_seqlen_q=longest, max_seqlen_kv=longest,
        )  # fmt: skip
    counted = shard.loss_mask
    total = sum(int(layout.shard_lm(tokens, r).loss_mask.sum()) for r in range(parallel.cp))
    return Local(arguments, shard.labels.clamp(min=0), counted, total, torch.tensor(layout.rows(rank)))


@dataclass(frozen=True)
class Step:
    """What a forward and backward pass gave, put together over the tensor- and context-parallel ranks."""

    logits: Tensor  # [b, real tokens, vocabulary]
    loss: Tensor  # 0-d
    grads: dict[str, Tensor]


def forward_backward(ddp: Any, batch: Batch, parallel: Parallel, scale: float = 1.0) -> tuple[Tensor, Tensor, Local]:
    """Local logits and this rank's share of the loss; gradients are left where DDP puts them."""
    local = local_batch(batch, parallel)
    logits = ddp(**local.arguments)  # [b, s, vocabulary / TP]
    # Cross-entropy writes over what it gets.
    losses = ddp.module.compute_language_model_loss(local.labels, logits.transpose(0, 1).contiguous().clone())  # [b, s]
    share = losses[local.counted].sum() / local.tokens
    # DDP divides by its ranks; every data-parallel replica has the same batch here.
    (share * parallel.cp * scale).backward()
    return logits, share.detach(), local


def step_of(model: Model, batch: Batch, parallel: Parallel, spec: Any = None) -> Step:
    """One step of Megatron's own DDP."""
    ddp = wrap(build(model, parallel, spec))
    ddp.zero_grad_buffer()
    logits, share, local = forward_backward(ddp, batch, parallel)
    finish_gradients(ddp, parallel)
    return gather(ddp, logits, share, local, parallel)


def finish_gradients(ddp: Any, parallel: Parallel) -> None:
    """Reduce gradients over data- and context-parallel ranks, and those of norms over tensor-parallel ones with SP.

    Without sequence parallelism every norm's gradient is whole on every tensor-parallel rank already, but finalizing
    sums those of `q_layernorm` once more, which doubles them in the stock layer as well.
    """
    from megatron.core.distributed import finalize_model_grads

    if parallel.tp > 1 and not parallel.sequence_parallel:
        ddp.finish_grad_sync()
    else:
        finalize_model_grads([ddp])


def gather(ddp: Any, logits: Tensor, share: Tensor, local: Local, parallel: Parallel) -> Step:
    from megatron.core import parallel_state

    cp_group = parallel_state.get_context_parallel_group()
    loss = share.clone()
    dist.all_reduce(loss, group=cp_group)
    whole = _joined(_joined(logits.detach(), 2, parallel_state.get_tensor_model_parallel_group()), 1, cp_group)
    rows = _joined(local.rows, 0, cp_group)
    order = torch.argsort(rows[rows >= 0])
    return Step(
        whole[:, rows >= 0][:, order],
        loss,
        {name: whole_parameter(p, p.main_grad).clone() for name, p in ddp.module.named_parameters()},
    )


def whole_parameter(parameter: Tensor, value: Tensor) -> Tensor:
    """A parameter, or something of its shape, put together over the tensor-parallel ranks."""
    from megatron.core import parallel_state

    if not getattr(parameter, "tensor_model_parallel", False):
        return value
    group = parallel_state.get_tensor_model_parallel_group()
    return _joined(value, parameter.partition_dim, group)  # type: ignore[attr-defined]


def _joined(x: Tensor, dim: int, group: Any) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim)
