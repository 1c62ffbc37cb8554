"""What the CUDA kernels of others need: a GPU of the right kind, a package, functions with the arguments in use."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

__all__ = ["aligned", "gpu_lacks", "signature_lacks"]

_ALIGNMENT = 16  # bytes: tensor memory accelerators and vectorised loads want rows to start there


def gpu_lacks(majors: Collection[int]) -> str | None:
    """Why the current CUDA device is none of these major compute capabilities; None if it is one."""
    # ROCm answers through torch.cuda as well, with numbers of its own.
    if torch.version.cuda is None or not torch.cuda.is_available():
        return "this PyTorch finds no CUDA device"
    major, minor = torch.cuda.get_device_capability()
    if major in majors:
        return None
    return f"this device has compute capability {major}.{minor}: it needs {' or '.join(f'{m}.x' for m in majors)}"


def signature_lacks(what: str, there: Collection[str], wanted: Collection[str]) -> str | None:
    """Which arguments in use here ``what`` does not have; None if it has all."""
    unknown = [name for name in wanted if name not in there]
    return f"{what} has no argument {', '.join(unknown)}: install another release" if unknown else None


def aligned(x: Tensor) -> Tensor:
    """``x`` [B, S, h, D], or a contiguous copy where a row of a head does not start at a multiple of 16 bytes.

    Broadcast dims are copied out too: kernels do not expect strides of 0.
    """
    step = _ALIGNMENT // x.element_size()
    starts = (*x.stride()[:3], x.storage_offset())
    if all(start % step == 0 for start in starts) and 0 not in x.stride():
        return x
    return x.clone(memory_format=torch.contiguous_format)
