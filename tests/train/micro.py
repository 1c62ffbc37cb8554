"""A model and a corpus small enough that a training step takes milliseconds."""

from __future__ import annotations

import json
import random
from pathlib import Path

from laga_attn.train.options import TrainOptions

__all__ = ["MICRO", "SEQ_LEN", "micro_options", "write_micro"]

SEQ_LEN = 64

# All head sizes differ, so that none can stand in for another.
MICRO = {
    "model_type": "deepseek_v3",
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 0,
    "max_position_embeddings": 512,
}


def write_micro(folder: Path) -> None:
    """Write `config.json` and a `data` folder of words in files of several lengths, some shorter than a row."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MICRO))
    (folder / "data").mkdir()
    choice = random.Random(0)
    for number, words in enumerate((3, 40, 7, 60, 25, 90, 12, 5)):
        text = " ".join(choice.choice(["latent", "gather", "ring", "head", "rope"]) for _ in range(words))
        (folder / "data" / f"{number}.txt").write_text(text)


def micro_options(folder: Path, out: str, **changes: object) -> TrainOptions:
    """Options of a short run on what `write_micro` wrote; the run goes to `folder / out`."""
    values = {
        "model": str(folder / "config.json"),
        "data": (str(folder / "data"),),
        "out": folder / out,
        "steps": 6,
        "seq_len": SEQ_LEN,
        "lr": 1e-2,
        "warmup": 2,
        "save_every": 2,
        "device": "cpu",
        "timeout": 30.0,
        **changes,
    }
    return TrainOptions(**values)
