"""Who holds which token: sequences and packed documents split over context-parallel ranks.

A layout is pure bookkeeping on integers. It never looks at a tensor's values and knows nothing of process groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from laga_attn.spans import Span

__all__ = ["Index", "LMShard", "LayoutKind", "SequenceLayout", "Span", "ranges"]

LayoutKind = Literal["contiguous", "zigzag"]
Index = NDArray[np.int64]


class LMShard(NamedTuple):
    """One rank's part of a language-model batch, every field `[B, local_len]`."""

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor
    loss_mask: Tensor


@dataclass(frozen=True, slots=True)
class SequenceLayout:
    """How one sequence, or several packed documents, is split over `cp_size` ranks.

    `contiguous` gives rank r the r-th block of every document. `zigzag` cuts every document into 2P chunks and
    gives rank r chunks r and 2P-1-r, which balances causal attention (Megatron-Core and Transformer Engine call
    it DualChunkSwap). Documents keep their order inside a rank. A document whose length does not divide is padded
    at its end; pads take part in nothing.

    Build one with `zigzag`, `contiguous` or `packed`. `lengths` are the real document lengths, `padded_lengths`
    what they occupy once padded, both in tokens. Layouts compare and hash by value.
    """

    kind: LayoutKind
    cp_size: int
    lengths: tuple[int, ...]
    padded_lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.kind not in get_args(LayoutKind):
            raise ValueError(f"unknown layout kind {self.kind!r}; choose one of {', '.join(get_args(LayoutKind))}")
        if self.cp_size < 1:
            raise ValueError(f"cp_size must be at least 1, got {self.cp_size}")
        if len(self.lengths) != len(self.padded_lengths) or not self.lengths:
            raise ValueError(
                f"a layout needs at least one document and one padded length for each, got {len(self.lengths)} "
                f"lengths and {len(self.padded_lengths)} padded lengths"
            )
        unit = self.multiple
        for number, (length, padded) in enumerate(zip(self.lengths, self.padded_lengths, strict=True)):
            if length < 0 or padded < length:
                raise ValueError(
                    f"document {number} has length {length} and padded length {padded}; "
                    "0 <= length <= padded length must hold"
                )
            if padded % unit:
                raise ValueError(
                    f"document {number} has padded length {padded}, which is not a multiple of {unit} "
                    f"({self.kind} over {self.cp_size} ranks); pad it to {_round_up(padded, unit)} "
                    "or leave the padded lengths out and the layout pads by itself"
                )

    @classmethod
    def zigzag(cls, seq_len: int, cp_size: int) -> SequenceLayout:
        """One sequence of `seq_len` tokens in 2P chunks, rank r holding chunks r and 2P-1-r."""
        return cls._of("zigzag", (_length(seq_len),), cp_size)

    @classmethod
    def contiguous(cls, seq_len: int, cp_size: int) -> SequenceLayout:
        """One sequence of `seq_len` tokens in P blocks, rank r holding block r."""
        return cls._of("contiguous", (_length(seq_len),), cp_size)

    @classmethod
    def packed(
        cls,
        cu_seqlens: Sequence[int] | Tensor,
        cp_size: int,
        kind: LayoutKind = "zigzag",
        cu_seqlens_padded: Sequence[int] | Tensor | None = None,
    ) -> SequenceLayout:
        """Documents packed one after another; each is split by itself.

        Args:
            cu_seqlens: `[n + 1]` offsets of the documents in the real, unpadded token stream, starting at 0.
            cp_size: number of context-parallel ranks.
            kind: `"zigzag"` or `"contiguous"`, inside every document.
            cu_seqlens_padded: `[n + 1]` offsets in a stream that the caller has already padded; each padded length
                must be a multiple of 2P (zigzag) or P (contiguous). None: the least padding that fits.

        Raises:
            ValueError: offsets that do not start at 0 or decrease, or padded lengths that do not fit.
        """
        lengths = _lengths(cu_seqlens, "cu_seqlens")
        if cu_seqlens_padded is None:
            return cls._of(kind, lengths, cp_size)
        return cls(kind, cp_size, lengths, _lengths(cu_seqlens_padded, "cu_seqlens_padded"))

    @classmethod
    def _of(cls, kind: LayoutKind, lengths: tuple[int, ...], cp_size: int) -> SequenceLayout:
        if cp_size < 1:
            raise ValueError(f"cp_size must be at least 1, got {cp_size}")
        unit = _multiple(kind, cp_size)
        return cls(kind, cp_size, lengths, tuple(_round_up(n, unit) for n in lengths))

    @property
    def multiple(self) -> int:
        """What every padded document length is a multiple of: 2P for zigzag, P for contiguous, 1 for one rank."""
        return _multiple(self.kind, self.cp_size)

    @property
    def seq_len(self) -> int:
        """Real tokens, pads not counted."""
        return sum(self.lengths)

    @property
    def padded_len(self) -> int:
        """Tokens with pads, over all ranks."""
        return sum(self.padded_lengths)

    @property
    def local_len(self) -> int:
        """Rows that every rank holds, pads included."""
        return self.padded_len // self.cp_size

    @property
    def cu_seqlens(self) -> tuple[int, ...]:
        """`[n + 1]` document offsets in the real token stream."""
        return (0, *accumulate(self.lengths))

    def padded_rows(self, rank: int) -> Index:
        """`[local_len]` index of each local row in the padded token stream, ascending."""
        self._check_rank(rank)
        padded = np.asarray(self.padded_lengths, dtype=np.int64)
        base = np.cumsum(padded) - padded
        if self.kind == "contiguous" or self.cp_size == 1:
            block = padded // self.cp_size
            return ranges(base + rank * block, block)
        chunk = padded // (2 * self.cp_size)
        starts = np.stack([base + rank * chunk, base + (2 * self.cp_size - 1 - rank) * chunk], axis=1)  # [n, 2]
        return ranges(starts.reshape(-1), np.repeat(chunk, 2))

    def rows(self, rank: int) -> Index:
        """`[local_len]` index of each local row in the real token stream, -1 for a pad; real rows ascend."""
        return self._real_index()[self.padded_rows(rank)]

    def rows_by_rank(self) -> list[Index]:
        """`rows` of every rank, in rank order."""
        index = self._real_index()
        return [index[self.padded_rows(rank)] for rank in range(self.cp_size)]

    def positions(self, rank: int, device: torch.device | str | None = None) -> Tensor:
        """`[local_len]` int64 position of each local row inside its own document (0 for pads): what RoPE needs."""
        lengths = np.asarray(self.lengths, dtype=np.int64)
        inside = ranges(np.zeros_like(lengths), lengths)  # [seq_len]
        rows = self.rows(rank)
        real = rows >= 0
        positions = np.zeros(self.local_len, dtype=np.int64)
        positions[real] = inside[rows[real]]
        return torch.tensor(positions, device=device)

    def shard(self, tensor: Tensor, rank: int, dim: int = 1, pad_value: float = 0) -> Tensor:
        """This rank's part of a tensor that holds the whole sequence along `dim`.

        Args:
            tensor: any dtype and rank; its size along `dim` is `seq_len`, or `padded_len` where the caller padded.
            rank: rank inside the context-parallel group.
            dim: the sequence dimension.
            pad_value: what pads are filled with when `tensor` has none.

        Returns:
            A new tensor with `local_len` along `dim`. Differentiable.

        Raises:
            ValueError: another length along `dim`, or a rank outside the group.
        """
        length = tensor.shape[dim]
        if length not in (self.seq_len, self.padded_len):
            raise ValueError(
                f"tensor of shape {tuple(tensor.shape)} has {length} tokens along dim {dim}, but the layout holds "
                f"{self.seq_len} ({self.padded_len} with pads); pass the whole sequence, and the dim that holds it"
            )
        if length == self.padded_len:
            return tensor.index_select(dim, torch.tensor(self.padded_rows(rank), device=tensor.device))
        rows = self.rows(rank)
        picked = tensor.index_select(dim, torch.tensor(np.maximum(rows, 0), device=tensor.device))
        mask_shape = [1] * tensor.ndim
        mask_shape[dim] = self.local_len
        return picked.masked_fill(torch.tensor(rows < 0, device=tensor.device).view(mask_shape), pad_value)

    def unshard(self, parts: Sequence[Tensor], dim: int = 1) -> Tensor:
        """The whole real sequence along `dim` from the parts of ranks 0..P-1; pads are dropped. Differentiable."""
        if len(parts) != self.cp_size:
            raise ValueError(f"unshard needs the parts of all {self.cp_size} ranks in rank order, got {len(parts)}")
        for rank, part in enumerate(parts):
            if part.shape[dim] != self.local_len:
                raise ValueError(
                    f"the part of rank {rank} has {part.shape[dim]} rows along dim {dim}, "
                    f"but each rank holds {self.local_len}"
                )
        held = np.concatenate(self.rows_by_rank())  # [padded_len]
        source = np.empty(self.seq_len, dtype=np.int64)
        source[held[held >= 0]] = np.flatnonzero(held >= 0)
        return torch.cat(list(parts), dim).index_select(dim, torch.tensor(source, device=parts[0].device))

    def shard_lm(self, tokens: Tensor, rank: int, ignore_index: int = -100, pad_token: int = 0) -> LMShard:
        """Inputs, labels, positions and loss mask of one rank for next-token prediction.

        Labels are shifted inside every document *before* the sequence is split, because the token after a rank's
        last one lives elsewhere. The last token of a document has no label.

        Args:
            tokens: `[B, seq_len]` token ids of the whole sequence.
            rank: rank inside the context-parallel group.
            ignore_index: label of rows that predict nothing (a document's last token, pads).
            pad_token: input id of pads.

        Returns:
            `LMShard`: `input_ids`, `labels`, `position_ids` int64 and `loss_mask` bool, each `[B, local_len]`.
        """
        if tokens.ndim != 2 or tokens.shape[1] != self.seq_len:
            raise ValueError(f"tokens must have shape [B, {self.seq_len}], got {list(tokens.shape)}")
        if tokens.is_floating_point():
            raise ValueError(f"tokens must be integers, got {tokens.dtype}")
        tokens = tokens.long()  # narrower types could not hold ignore_index
        labels = torch.roll(tokens, -1, dims=1)
        last = [end - 1 for end, length in zip(self.cu_seqlens[1:], self.lengths, strict=True) if length]
        labels[:, last] = ignore_index
        local_labels = self.shard(labels, rank, pad_value=ignore_index)
        return LMShard(
            input_ids=self.shard(tokens, rank, pad_value=pad_token),
            labels=local_labels,
            position_ids=self.positions(rank, tokens.device).expand(tokens.shape[0], -1),
            loss_mask=local_labels != ignore_index,
        )

    def _real_index(self) -> Index:
        """`[padded_len]` real index of each padded slot, -1 for pads."""
        lengths = np.asarray(self.lengths, dtype=np.int64)
        padded = np.asarray(self.padded_lengths, dtype=np.int64)
        index = np.full(self.padded_len, -1, dtype=np.int64)
        index[ranges(np.cumsum(padded) - padded, lengths)] = np.arange(self.seq_len)
        return index

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.cp_size:
            raise ValueError(f"rank {rank} is outside this layout's {self.cp_size} ranks (0..{self.cp_size - 1})")


def ranges(starts: Index, lengths: Index) -> Index:
    """The concatenation of `arange(start, start + length)` over all pairs."""
    total = int(lengths.sum())
    offsets = np.cumsum(lengths) - lengths
    return np.repeat(starts - offsets, lengths) + np.arange(total, dtype=np.int64)


def _multiple(kind: LayoutKind, cp_size: int) -> int:
    if cp_size == 1:
        return 1
    return 2 * cp_size if kind == "zigzag" else cp_size


def _round_up(length: int, unit: int) -> int:
    return -(-length // unit) * unit


def _length(seq_len: int) -> int:
    if seq_len < 1:
        raise ValueError(f"seq_len must be at least 1, got {seq_len}")
    return int(seq_len)


def _lengths(offsets: Sequence[int] | Tensor, name: str) -> tuple[int, ...]:
    values = offsets.tolist() if isinstance(offsets, Tensor) else [int(value) for value in offsets]
    if isinstance(offsets, Tensor) and (offsets.ndim != 1 or offsets.is_floating_point()):
        raise ValueError(f"{name} must be a 1-D integer tensor, got {offsets.dtype} of shape {list(offsets.shape)}")
    lengths = tuple(after - before for before, after in pairwise(values))
    if len(values) < 2 or values[0] != 0 or min(lengths) < 0:
        raise ValueError(f"{name} must start at 0, never decrease and hold n + 1 offsets, got {values[:8]}")
    return lengths
