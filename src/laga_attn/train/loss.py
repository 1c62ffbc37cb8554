"""From a packed row to the summed loss of one rank's tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laga_attn.layout import LMShard, SequenceLayout
from laga_attn.train.data import Row

__all__ = ["IGNORED", "shard_row", "token_loss_sum"]

IGNORED = -100


def shard_row(row: Row, cp_size: int, cp_rank: int, device: torch.device) -> tuple[SequenceLayout, LMShard]:
    """One rank's part of a row, and the layout that split it; fields are `[1, local_len]` on `device`."""
    layout = SequenceLayout.packed(row.cu_seqlens, cp_size)
    tokens = torch.from_numpy(row.tokens)[None]  # [1, seq_len]
    shard = layout.shard_lm(tokens, cp_rank, ignore_index=IGNORED)
    return layout, LMShard(*(part.to(device) for part in shard))


def token_loss_sum(model: nn.Module, layout: SequenceLayout, shard: LMShard) -> Tensor:
    """Sum of the losses of this rank's tokens, 0-d fp32. Part of the graph even where no token counts."""
    output = model(input_ids=shard.input_ids, layout=layout, use_cache=False)
    logits = output.logits.float().flatten(0, 1)  # [local_len, vocab]
    return F.cross_entropy(logits, shard.labels.flatten(), ignore_index=IGNORED, reduction="sum")
