"""Fine-tune a Hugging Face MLA model on documents that are split over several processes.

    torchrun --nproc-per-node 2 examples/hf_finetune.py

The model is a tiny DeepSeek-V3 with random weights, so this runs on a laptop in seconds; put
`AutoModelForCausalLM.from_pretrained(...)` in its place for a real one. The loss is the same for any number of
processes, and falls because the same few documents come again in every step.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

import laga_attn as laga


def tiny_model() -> DeepseekV3ForCausalLM:
    torch.manual_seed(0)  # the same weights on every rank
    config = DeepseekV3Config(
        vocab_size=128, hidden_size=64, intermediate_size=128, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, q_lora_rank=48, kv_lora_rank=32, qk_nope_head_dim=16,
        qk_rope_head_dim=8, v_head_dim=16, n_routed_experts=8, num_experts_per_tok=2, n_group=1, topk_group=1,
        first_k_dense_replace=1,
    )  # fmt: skip
    return DeepseekV3ForCausalLM(config)


def train(cp: laga.ContextParallel, steps: int = 20) -> list[float]:
    """Mean loss per token of every step, over all ranks."""
    model = tiny_model()
    laga.transformers.parallelize(model, cp=cp, scheme="laga")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    lengths = (90, 41, 125)  # three documents in one pack; the layout pads them where it must
    tokens = torch.randint(128, (1, sum(lengths)), generator=torch.Generator().manual_seed(1))
    layout = laga.SequenceLayout.packed([0, 90, 131, 256], cp.size)
    batch = layout.shard_lm(tokens, cp.rank)  # this rank's inputs, labels, positions and loss mask

    losses = []
    for _ in range(steps):
        logits = model(batch.input_ids, layout=layout).logits
        loss_sum = cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum")
        loss = laga.token_mean_loss(loss_sum, batch.loss_mask.sum(), cp.group)  # this rank's share
        loss.backward()
        laga.reduce_gradients(model, cp.group)  # sum over the ranks: now all hold the same gradients
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        if cp.size > 1:
            dist.all_reduce(mean, group=cp.group)
        losses.append(mean.item())
    return losses


def main() -> None:
    dist.init_process_group("gloo")
    for step, loss in enumerate(train(laga.ContextParallel(dist.group.WORLD))):
        if dist.get_rank() == 0:
            print(f"step {step:2d}  loss {loss:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
