"""Train a small MLA + MoE model of Megatron-Core on text bytes, with the latent on the wire.

    torchrun --nproc-per-node 4 examples/megatron_mla.py --tp 2 --cp 2 --scheme laga

Run it again with `--scheme explicit` or `absorbed`: the losses are the same, the traffic is not. With GPUs it uses
NCCL, bf16 and, where Transformer Engine is installed, its layers; `explicit` is then Transformer Engine's own
attention. Without a GPU it uses gloo, and the work-arounds of this repository's tests for what Megatron-Core takes
for granted about GPUs.
"""

# ruff: noqa: E402  (Megatron is imported after the choice of how to import it)
from __future__ import annotations

import argparse
import inspect
import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]
ON_GPU = torch.cuda.is_available()

if not ON_GPU:
    sys.path.insert(0, str(ROOT))
    from tests.megatron_cpu import megatron_on_cpu  # before Megatron, which would compile its fusions

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron.core.utils import get_batch_on_this_cp_rank, is_te_min_version

import laga_attn as laga


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scheme", default="laga", choices=["laga", "explicit", "absorbed", "auto"])
    parser.add_argument("--ulysses-degree", default="auto", help="ranks that exchange heads, or auto (default)")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks; sequence parallelism comes with them")
    parser.add_argument("--cp", type=int, default=1, help="context-parallel ranks")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seq-len", type=int, default=256, help="tokens per sequence, a multiple of 2 * tp * cp")
    parser.add_argument("--batch", type=int, default=2, help="sequences per data-parallel rank and step")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--text", type=Path, help="a text file (default: the sources of laga_attn)")
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=ON_GPU)
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    dist.init_process_group("nccl" if ON_GPU else "gloo")
    if ON_GPU:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    with nullcontext() if ON_GPU else megatron_on_cpu():
        parallel_state.initialize_model_parallel(options.tp, context_parallel_size=options.cp)
        losses, table = train(options)
    if dist.get_rank() == 0:
        for step, loss in enumerate(losses):
            print(f"step {step:3d}  loss {loss:.4f}")
        print(f"\nattention's traffic of rank 0 in the last step, scheme {options.scheme}:\n{table}")
    dist.destroy_process_group()


def train(options: argparse.Namespace) -> tuple[list[float], str]:
    """Losses of all steps, and the traffic of this rank in the last one."""
    model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    model = build_model(options)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=3e-3, bf16=options.bf16), [model])
    batches = text_batches(options)
    losses = []
    for _ in range(options.steps):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        batch = next(batches)
        with laga.traffic() as traffic:
            # [b, s]; every rank has as many tokens as any other, so the mean of its means is the mean of all
            loss = model(batch["tokens"], batch["positions"], None, labels=batch["labels"]).mean()
            loss.backward()
        finalize_model_grads([model])
        optimizer.step()
        losses.append(mean_over_tokens(loss.detach()))
    return losses, traffic.table()


def build_model(options: argparse.Namespace) -> DistributedDataParallel:
    config = MLATransformerConfig(
        num_layers=options.layers, hidden_size=128, num_attention_heads=8, ffn_hidden_size=256, kv_channels=16,
        q_lora_rank=64, kv_lora_rank=32, qk_head_dim=16, qk_pos_emb_head_dim=8, v_head_dim=16,
        rope_type="yarn", rotary_scaling_factor=4.0, original_max_position_embeddings=64, mscale_all_dim=1.0,
        qk_layernorm=True, normalization="RMSNorm", add_bias_linear=False, hidden_dropout=0.0, attention_dropout=0.0,
        num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=128, moe_aux_loss_coeff=1e-2,
        moe_token_dispatcher_type="alltoall",
        tensor_model_parallel_size=options.tp, context_parallel_size=options.cp, sequence_parallel=options.tp > 1,
        bf16=options.bf16, params_dtype=torch.bfloat16 if options.bf16 else torch.float32,
        use_cpu_initialization=not ON_GPU,
    )  # fmt: skip
    with_te = ON_GPU and is_te_min_version("1.10.0")
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=with_te)
    if not (with_te and options.scheme == "explicit"):
        degree = options.ulysses_degree if options.ulysses_degree == "auto" else int(options.ulysses_degree)
        spec = laga.megatron.with_laga(spec, scheme=options.scheme, ulysses_degree=degree)
    model: Any = GPTModel(
        config, spec, vocab_size=256, max_sequence_length=options.seq_len, position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )  # fmt: skip
    if ON_GPU:
        model = model.cuda()
    if options.bf16:
        model = Float16Module(config, model)
    return DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)


def text_batches(options: argparse.Namespace) -> Iterator[dict[str, torch.Tensor]]:
    """This rank's part of random excerpts: its own sequences, and of those its own tokens."""
    if options.text is not None:
        text = options.text.read_bytes()
    else:
        text = b"\n".join(path.read_bytes() for path in sorted((ROOT / "src").rglob("*.py")))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    if len(data) <= options.seq_len + 1:
        raise ValueError(f"the text has {len(data)} bytes, --seq-len {options.seq_len} needs more")
    generator = torch.Generator().manual_seed(parallel_state.get_data_parallel_rank())
    hybrid = "is_hybrid_cp" in inspect.signature(get_batch_on_this_cp_rank).parameters  # newer releases ask
    while True:
        starts = torch.randint(len(data) - options.seq_len - 1, (options.batch,), generator=generator)
        rows = torch.stack([data[start : start + options.seq_len + 1] for start in starts.tolist()])
        batch = {
            "tokens": rows[:, :-1].contiguous(),
            "labels": rows[:, 1:].contiguous(),
            "positions": torch.arange(options.seq_len).repeat(options.batch, 1),
        }
        mine = get_batch_on_this_cp_rank(batch, **({"is_hybrid_cp": False} if hybrid else {}))
        yield {name: tensor.cuda() if ON_GPU else tensor for name, tensor in mine.items()}


def mean_over_tokens(loss: torch.Tensor) -> float:
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    dist.all_reduce(loss, group=group)
    return float(loss) / dist.get_world_size(group)


if __name__ == "__main__":
    main()
