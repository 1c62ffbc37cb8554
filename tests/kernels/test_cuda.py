"""What the kernels that need a GPU find missing, on machines that are made up."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch

from laga_attn.kernels import cudnn, flash, kernels_here, select
from tests.kernels.stand_ins import flash3_library, flash4_module

MLA = {"device": "cuda", "dtype": torch.bfloat16, "qk_head_dim": 192, "v_head_dim": 128}


@dataclass
class Machine:
    """A machine whose GPU, packages and cuDNN a test chooses."""

    patch: pytest.MonkeyPatch

    def gpu(self, major: int, minor: int = 0) -> None:
        self.patch.setattr(torch.version, "cuda", "13.0")
        self.patch.setattr(torch.cuda, "is_available", lambda: True)
        self.patch.setattr(torch.cuda, "get_device_capability", lambda *args: (major, minor))

    def cudnn(self, version: int | None) -> None:
        self.patch.setattr(torch.backends.cudnn, "version", lambda: version)

    def flash3(self) -> None:
        self.patch.setitem(sys.modules, "flash_attn_3._C", ModuleType("flash_attn_3._C"))

    def flash4(self, module: ModuleType) -> None:
        self.patch.setitem(sys.modules, "flash_attn.cute.interface", module)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """With nothing on it."""
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: None)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    for module in ("flash_attn_3._C", "flash_attn.cute.interface"):
        monkeypatch.setitem(sys.modules, module, None)  # its import fails
    found = (flash._package3_lacks, flash._package4_lacks)
    for function in found:
        function.cache_clear()
    with flash3_library([]):
        yield Machine(monkeypatch)
    for function in found:
        function.cache_clear()


def reasons() -> dict[str, str | None]:
    return {
        "flash3": flash.missing_flash3(torch.bfloat16),
        "flash4": flash.missing_flash4(torch.bfloat16),
        "cudnn": cudnn.missing(torch.bfloat16),
    }


def test_without_a_gpu_all_of_them_say_so(machine: Machine) -> None:
    assert set(reasons().values()) == {"this PyTorch finds no CUDA device"}
    assert select("auto", **MLA).name == "sdpa"


def test_a_gpu_of_another_vendor_is_no_cuda_device(machine: Machine) -> None:
    machine.gpu(9, 4)
    machine.patch.setattr(torch.version, "cuda", None)
    assert set(reasons().values()) == {"this PyTorch finds no CUDA device"}


def test_what_is_not_there_is_named_with_the_way_to_get_it(machine: Machine) -> None:
    machine.gpu(9)
    missing = reasons()
    assert "FlashAttention 3 is not installed" in missing["flash3"]
    assert "hopper of https://github.com/Dao-AILab/flash-attention" in missing["flash3"]
    assert "pip install flash-attn-4" in missing["flash4"]
    assert missing["cudnn"] == "PyTorch has cuDNN None: it needs 91501 or newer"
    assert select("auto", **MLA).name == "sdpa"
    with pytest.raises(ValueError, match="pip install flash-attn-4"):
        select("flash4", **MLA)


def test_a_package_that_fails_to_load_takes_no_other_kernel_along(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(name: str) -> ModuleType:
        raise OSError(f"{name}: libcuda.so.1: cannot open shared object file")

    machine.gpu(9)
    monkeypatch.setattr(flash, "import_module", broken)
    assert "libcuda.so.1" in reasons()["flash3"]
    assert "libcuda.so.1" in reasons()["flash4"]
    assert select("auto", **MLA).name == "sdpa"


def test_a_package_without_the_functions_counts_as_not_installed(machine: Machine) -> None:
    machine.gpu(9)
    machine.flash4(ModuleType("flash_attn.cute.interface"))
    assert "no attribute '_flash_attn_fwd'" in reasons()["flash4"]


@pytest.mark.parametrize(
    ("major", "minor", "usable"),
    [(8, 0, []), (9, 0, ["flash3", "flash4", "cudnn"]), (10, 3, ["flash4", "cudnn"]), (11, 0, ["flash4"]), (12, 0, [])],
)
def test_auto_prefers_what_takes_192_and_128_and_runs_on_the_gpu(
    machine: Machine, major: int, minor: int, usable: list[str]
) -> None:
    machine.gpu(major, minor)
    machine.cudnn(91501)
    machine.flash3()
    machine.flash4(flash4_module([]))
    assert [name for name, reason in reasons().items() if reason is None] == usable
    for name, reason in reasons().items():
        assert name in usable or f"this device has compute capability {major}.{minor}" in reason
    assert kernels_here(torch.device("cuda"), torch.bfloat16) == (*usable, "sdpa", "blockwise", "reference")
    assert kernels_here(torch.device("cuda"), torch.float32) == ("sdpa", "blockwise", "reference")
    assert select("auto", **MLA).name == [*usable, "sdpa"][0]


def test_a_gradient_of_the_lse_a_window_and_other_dims_go_to_kernels_that_take_them(machine: Machine) -> None:
    machine.gpu(9)
    machine.cudnn(91501)
    machine.flash3()
    assert select("auto", **MLA, window=True).name == "flash3"
    assert select("auto", **MLA, lse_gradient=True).name == "sdpa"
    assert select("auto", **MLA, window=True, lse_gradient=True).name == "blockwise"
    assert select("auto", **{**MLA, "qk_head_dim": 128, "v_head_dim": 64}).name == "cudnn"
    assert select("auto", **{**MLA, "qk_head_dim": 576, "v_head_dim": 512}).name == "sdpa"
    assert select("auto", **{**MLA, "qk_head_dim": 576, "v_head_dim": 512}, shared_kv=True).name == "blockwise"
    machine.flash4(flash4_module([]))
    flash._package4_lacks.cache_clear()
    assert select("auto", **MLA, lse_gradient=True).name == "flash4"


@pytest.mark.parametrize("name", ["flash3", "cudnn"])
def test_a_kernel_that_derives_delta_from_the_output_refuses_a_gradient_of_the_lse(machine: Machine, name: str) -> None:
    with pytest.raises(ValueError, match="gradient of the LSE: it has that of the output alone"):
        select(name, **MLA, lse_gradient=True)


@pytest.mark.parametrize("version", [91002, 91500])
def test_an_old_cudnn_is_refused(machine: Machine, version: int) -> None:
    machine.gpu(9)
    machine.cudnn(version)
    assert reasons()["cudnn"] == f"PyTorch has cuDNN {version}: it needs 91501 or newer"


def test_cudnn_is_refused_where_torch_is_asked_to_be_deterministic(machine: Machine) -> None:
    machine.gpu(9)
    machine.cudnn(91501)
    assert reasons()["cudnn"] is None
    machine.patch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert reasons()["cudnn"] == "deterministic algorithms are switched on, and cuDNN attention is none"
    assert select("auto", **MLA).name == "sdpa"


def test_a_release_with_other_arguments_is_refused(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.gpu(9)
    machine.cudnn(91501)
    old = flash4_module([])
    old._flash_attn_bwd = lambda q, k, v, out, dout, lse, softmax_scale=None, causal=False: None
    machine.flash4(old)
    machine.flash3()
    monkeypatch.setattr(flash, "_arguments", lambda op: ["q", "k", "v", "softmax_scale", "causal"])
    assert "has no argument window_size_left, window_size_right, dlse, deterministic" in reasons()["flash4"]
    assert "flash_attn_3.fwd has no argument window_size_left" in reasons()["flash3"]
    cudnn._operators_lack.cache_clear()
    monkeypatch.setattr(cudnn, "_FORWARD", cudnn._FORWARD[:-1])
    try:
        assert "has other arguments than those in use here" in reasons()["cudnn"]
    finally:
        cudnn._operators_lack.cache_clear()
