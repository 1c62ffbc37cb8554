from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from laga_attn.attention import latent_attention
from laga_attn.kernels import TABLE, select, support_table, table
from laga_attn.kernels.support import Case
from laga_attn.layout import SequenceLayout

MLA = {"dtype": torch.bfloat16, "qk_head_dim": 192, "v_head_dim": 128}


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without one; what one brings is tested in ``test_cuda``."""
    monkeypatch.setattr(torch.version, "cuda", None)


def test_auto_takes_the_compiled_kernel_on_cpu_and_the_fused_one_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    for missing, name in ((None, "avx512"), ("this CPU has no AVX-512 instructions", "blockwise")):
        rows = [replace(row, missing=lambda dtype, m=missing: m) if row.name == "avx512" else row for row in TABLE]
        monkeypatch.setattr(table, "TABLE", tuple(rows))
        assert select("auto", device="cpu", **MLA).name == name
    assert select("auto", device="cuda", **MLA).name == "sdpa"
    assert select("auto", device=torch.device("cuda", 1), **MLA).name == "sdpa"


@pytest.mark.parametrize(
    "change",
    [{"window": True}, {"shared_kv": True}, {"dtype": torch.float64}, {"v_head_dim": 100}],
    ids=lambda c: next(iter(c)),
)
def test_auto_falls_back_to_blockwise_where_the_fused_kernel_cannot(change: dict[str, object]) -> None:
    case = {**MLA, **change}
    assert select("auto", device="cuda", **case).name == "blockwise"


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ({"device": "cpu"}, "head dims 192/128: it needs qk_head_dim == v_head_dim"),
        ({"device": "cuda", "window": True}, "no sliding window"),
        ({"device": "cuda", "shared_kv": True}, "shared key/value head"),
        ({"device": "cuda", "dtype": torch.float64}, "torch.float64: it takes float32, bfloat16, float16"),
        ({"device": "cuda", "qk_head_dim": 100}, "head dims 100/128: it needs both multiples of 8"),
        ({"device": "meta"}, "device meta: it runs on cpu"),
    ],
)
def test_a_named_kernel_that_cannot_says_why(case: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=r"kernel 'sdpa' cannot") as raised:
        select("sdpa", **{**MLA, **case})
    assert reason in str(raised.value)


def test_an_unknown_kernel_is_refused_with_the_choices() -> None:
    with pytest.raises(
        ValueError,
        match="unknown kernel 'flash': choose one of auto, flash3, flash4, cudnn, sdpa, avx512, blockwise, reference",
    ):
        select("flash", device="cpu", **MLA)


def test_the_printed_table_agrees_with_the_choice() -> None:
    flags = (False, True)
    for device, dtype, dims, window, shared, lse_gradient in itertools.product(
        ("cpu", "cuda"), (torch.float64, torch.bfloat16), ((192, 128), (64, 64)), flags, flags, flags
    ):
        case = Case(device, dtype, *dims, window, shared, lse_gradient)
        rows = support_table(
            device=device,
            dtype=dtype,
            qk_head_dim=dims[0],
            v_head_dim=dims[1],
            window=window,
            shared_kv=shared,
            lse_gradient=lse_gradient,
        )
        assert [row["kernel"] for row in rows] == [row.name for row in TABLE]
        (chosen,) = [row["kernel"] for row in rows if row["usable"] == "yes (auto)"]
        name = select(
            "auto",
            device=device,
            dtype=dtype,
            qk_head_dim=dims[0],
            v_head_dim=dims[1],
            window=window,
            shared_kv=shared,
            lse_gradient=lse_gradient,
        ).name
        assert chosen == name
        for row, support in zip(rows, TABLE, strict=True):
            reason = support.refusal(case)
            assert row["usable"] == reason if reason else row["usable"].startswith("yes")


def test_every_named_kernel_has_operators() -> None:
    for row in TABLE:
        for suffix in ("forward", "backward"):
            assert hasattr(torch.ops.laga_attn, f"{row.name}_{suffix}")


def test_a_call_asks_for_gradients_of_the_lse_only_where_it_may_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [replace(row, lse_gradient=False) if row.name == "reference" else row for row in TABLE]
    monkeypatch.setattr(table, "TABLE", tuple(rows))
    g = torch.Generator().manual_seed(0)
    shapes = ((1, 6, 2, 12), (1, 6, 8), (1, 6, 4), (2 * 16, 8))
    inputs = [torch.randn(shape, generator=g).requires_grad_() for shape in shapes]
    options = {
        "layout": SequenceLayout.contiguous(6, 1),
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "scheme": "laga",
        "kernel": "reference",
    }
    with pytest.raises(ValueError, match="gradient of the LSE"):
        latent_attention(*inputs, **options, return_lse=True)
    latent_attention(*inputs, **options)
    with torch.no_grad():
        latent_attention(*inputs, **options, return_lse=True)
