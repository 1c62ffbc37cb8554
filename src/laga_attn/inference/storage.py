"""The tensors of a latent cache: one row per token, layer by layer, in the dtype of storage.

A row is the normalised latent and the rotated key part side by side, so that the keys of a sequence are a view and
its values a narrower view of the same memory. In fp8 a row is bytes: the values, then one fp32 scale for the latent
and one for the key part (they differ in size by what the norm does). A row is all there is to a token, whatever the
dtype: rows are what is copied, sent and written to files.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from laga_attn.layout import Index

__all__ = ["FP8", "LatentStore", "RowCodec"]

FP8 = getattr(torch, "float8_e4m3fn", None)
"""The 8-bit dtype of caches, None where this PyTorch has none."""

_PLAIN = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_ALIGN = 4  # bytes: scales are read as fp32 where they lie
_GROWTH = 1.5


@dataclass(frozen=True, slots=True)
class RowCodec:
    """How the latent of a token becomes a stored row, and back.

    Raises:
        ValueError: a dtype that caches cannot have.
    """

    dtype: torch.dtype
    kv_lora_rank: int
    qk_rope_head_dim: int

    def __post_init__(self) -> None:
        if self.dtype not in _PLAIN and (FP8 is None or self.dtype != FP8):
            names = ", ".join(str(dtype) for dtype in (*_PLAIN, FP8) if dtype is not None)
            raise ValueError(f"a cache cannot be stored in {self.dtype}; choose one of {names}")

    @property
    def latent_dim(self) -> int:
        """Values per token."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def row_dtype(self) -> torch.dtype:
        """The dtype of rows as tensors."""
        return torch.uint8 if self._scaled else self.dtype

    @property
    def row_width(self) -> int:
        """Elements of a row, of `row_dtype`."""
        return self._scales_at + 8 if self._scaled else self.latent_dim

    @property
    def row_bytes(self) -> int:
        """Bytes per token and layer."""
        return self.row_width * self.row_dtype.itemsize

    def encode(self, latent: Tensor) -> Tensor:
        """`[n, kv_lora_rank + qk_rope_head_dim]` in any floating dtype to rows `[n, row_width]`."""
        if not self._scaled:
            return latent.to(self.dtype)
        rows = latent.new_zeros(latent.shape[0], self.row_width, dtype=torch.uint8)
        scales = latent.new_empty(latent.shape[0], 2, dtype=torch.float32)
        largest = torch.finfo(self.dtype).max
        for column, part in enumerate(self._parts()):
            values = latent[:, part].float()
            scale = values.abs().amax(dim=1, keepdim=True) / largest
            scale = torch.where(scale > 0, scale, torch.ones_like(scale))  # a row of zeros stays zeros
            rows[:, part] = (values / scale).clamp(-largest, largest).to(self.dtype).view(torch.uint8)
            scales[:, column : column + 1] = scale
        rows[:, self._scales_at :] = scales.view(torch.uint8)
        return rows

    def decode(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows `[n, row_width]` to latents in `dtype`; the rows themselves where that is how they are stored."""
        if not self._scaled:
            return rows.to(dtype)
        latent = rows.new_empty(rows.shape[0], self.latent_dim, dtype=dtype)
        scales = rows[:, self._scales_at :].contiguous().view(torch.float32)
        for column, part in enumerate(self._parts()):
            latent[:, part] = rows[:, part].view(self.dtype).float() * scales[:, column : column + 1]
        return latent

    @property
    def _scaled(self) -> bool:
        return self.dtype not in _PLAIN

    @property
    def _scales_at(self) -> int:
        return -(-self.latent_dim // _ALIGN) * _ALIGN

    def _parts(self) -> tuple[slice, slice]:
        return slice(0, self.kv_lora_rank), slice(self.kv_lora_rank, self.latent_dim)


class LatentStore:
    """The pages of one rank: for each layer `[pages * page_size, row_width]`."""

    def __init__(self, codec: RowCodec, num_layers: int, page_size: int, device: torch.device, pages: int) -> None:
        self.codec = codec
        self._page_size = page_size
        # Ordinary tensors even under inference_mode, so that they can be written to outside of it later.
        with torch.inference_mode(False):
            empty = torch.empty(0, codec.row_width, dtype=codec.row_dtype, device=device)
            self._layers = [empty] * num_layers
            self.reserve(pages, exact=True)

    @property
    def pages(self) -> int:
        """Pages that there is memory for."""
        return self._layers[0].shape[0] // self._page_size

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the pages take on this rank, all layers, used or not."""
        return sum(layer.untyped_storage().nbytes() for layer in self._layers)

    def reserve(self, pages: int, *, exact: bool = False) -> None:
        """Make room for `pages` pages; grown layer by layer, so only one layer exists twice at a time."""
        if pages <= self.pages and not exact:
            return
        target = pages if exact else max(pages, int(self.pages * _GROWTH))
        with torch.inference_mode(False):
            for number, layer in enumerate(self._layers):
                grown = layer.new_empty(target * self._page_size, layer.shape[1])
                grown[: layer.shape[0]] = layer
                self._layers[number] = grown

    def copy_page(self, source: int, target: int, rows: int) -> None:
        """The first `rows` tokens of a page to another, in every layer."""
        begin, end = source * self._page_size, target * self._page_size
        for layer in self._layers:
            layer[end : end + rows] = layer[begin : begin + rows]

    def write(self, layer: int, where: Tensor, rows: Tensor) -> None:
        """Rows `[n, row_width]` to the places `where [n]`, from any device."""
        target = self._layers[layer]
        target.index_copy_(0, where.to(target.device), rows.to(target.device))

    def read(self, layer: int, pages: Index) -> Tensor:
        """The rows of these pages, `[len(pages) * page_size, row_width]`: a view where they follow each other."""
        if not len(pages):
            return self._layers[layer][:0]
        first, count = int(pages[0]), len(pages)
        if int(pages[-1]) - first == count - 1 and (count < 3 or bool((pages[1:] > pages[:-1]).all())):
            return self._layers[layer][first * self._page_size : (first + count) * self._page_size]
        by_page: Tensor = self._layers[layer].view(-1, self._page_size, self.codec.row_width)
        return by_page.index_select(0, torch.tensor(pages, device=by_page.device)).flatten(0, 1)
