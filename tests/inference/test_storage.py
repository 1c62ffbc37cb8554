"""Rows: what they cost, what they lose, and when reading them is a view."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laga_attn.inference.storage import FP8, LatentStore, RowCodec
from tests.compare import relative_error

needs_fp8 = pytest.mark.skipif(FP8 is None, reason="this PyTorch has no float8_e4m3fn")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_plain_rows_are_the_latents_in_the_dtype_of_storage(dtype):
    latent = torch.randn(5, 12, dtype=torch.float64)
    codec = RowCodec(dtype, 8, 4)
    rows = codec.encode(latent)
    assert torch.equal(rows, latent.to(dtype))
    assert codec.decode(rows, dtype) is rows
    assert codec.row_bytes == rows[0].nbytes


@needs_fp8
@settings(max_examples=40, deadline=None)
@given(st.integers(1, 70), st.integers(1, 9), st.integers(-30, 30), st.integers(-30, 30))
def test_fp8_keeps_every_value_within_a_sixteenth_of_the_largest_of_its_part(rank, rope, scale, rope_scale):
    """Latent and key part have scales of their own, so neither drowns the other."""
    codec = RowCodec(FP8, rank, rope)
    latent = torch.randn(7, rank + rope)
    latent[:, :rank] *= 2.0**scale
    latent[:, rank:] *= 2.0**rope_scale
    latent[3] = 0
    rows = codec.encode(latent)
    assert rows.shape == (7, codec.row_width)
    assert codec.row_bytes == -(-(rank + rope) // 4) * 4 + 8
    back = codec.decode(rows, torch.float32)
    for part in (slice(0, rank), slice(rank, rank + rope)):
        error = (back[:, part] - latent[:, part]).abs()
        largest = latent[:, part].abs().amax(1, keepdim=True)
        # e4m3: half a unit in the last of 3 mantissa bits, and a coarse bottom 2^-9 below 448 / 2^-6.
        assert (error <= latent[:, part].abs() / 16 + largest * 2.0**-9 / 448 + 1e-30).all()
        assert torch.equal(back[3], torch.zeros_like(back[3]))


@needs_fp8
def test_fp8_takes_half_of_bf16_and_loses_little():
    codec = RowCodec(FP8, 512, 64)
    assert codec.row_bytes == 584
    latent = torch.randn(50, 576)
    back = codec.decode(codec.encode(latent.bfloat16()), torch.bfloat16)
    assert relative_error(back, latent) < 0.04


def store(pages: int = 6) -> LatentStore:
    made = LatentStore(RowCodec(torch.float32, 3, 1), 2, 2, torch.device("cpu"), pages)
    made.write(1, torch.arange(pages * 2), torch.arange(pages * 2.0)[:, None].expand(-1, 4))
    return made


def test_pages_that_follow_each_other_are_read_without_a_copy():
    made = store()
    whole = made.read(1, np.arange(6))
    part = made.read(1, np.array([2, 3, 4]))
    assert part.data_ptr() == whole.data_ptr() + 4 * 4 * 4
    assert part[:, 0].tolist() == [4, 5, 6, 7, 8, 9]
    assert made.read(1, np.array([], dtype=np.int64)).shape == (0, 4)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=6, unique=True))
def test_pages_are_read_in_the_order_asked_for(pages):
    rows = store().read(1, np.array(pages))
    assert rows[:, 0].tolist() == [float(page * 2 + i) for page in pages for i in range(2)]


def test_growing_keeps_rows_and_inference_mode_leaves_ordinary_tensors():
    with torch.inference_mode():
        made = store(2)
        made.reserve(5)
    assert made.pages == 5
    assert made.read(1, np.array([0, 1]))[:, 0].tolist() == [0, 1, 2, 3]
    made.write(0, torch.tensor([9]), torch.ones(1, 4))  # outside of inference mode
    made.copy_page(1, 4, 1)
    assert made.read(1, np.array([4]))[0, 0] == 2
    assert made.nbytes == 2 * 10 * 4 * 4
