from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from laga_attn.kernels import TABLE, select, support_table, table
from laga_attn.kernels.table import Case

MLA = {"dtype": torch.bfloat16, "qk_head_dim": 192, "v_head_dim": 128}


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
        ValueError, match="unknown kernel 'flash': choose one of auto, sdpa, avx512, blockwise, reference"
    ):
        select("flash", device="cpu", **MLA)


def test_the_printed_table_agrees_with_the_choice() -> None:
    for device, dtype, dims, window, shared in itertools.product(
        ("cpu", "cuda"), (torch.float64, torch.bfloat16), ((192, 128), (64, 64)), (False, True), (False, True)
    ):
        case = Case(device, dtype, *dims, window, shared)
        rows = support_table(
            device=device, dtype=dtype, qk_head_dim=dims[0], v_head_dim=dims[1], window=window, shared_kv=shared
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
        ).name
        assert chosen == name
        for row, support in zip(rows, TABLE, strict=True):
            reason = support.refusal(case)
            assert row["usable"] == reason if reason else row["usable"].startswith("yes")


def test_every_named_kernel_has_operators() -> None:
    for row in TABLE:
        for suffix in ("forward", "backward"):
            assert hasattr(torch.ops.laga_attn, f"{row.name}_{suffix}")
