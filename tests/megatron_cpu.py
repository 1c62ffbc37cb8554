"""What Megatron-Core needs to run on a machine without GPU: the places where it names one although it needs none.

None of this is about attention, and none of it is in the library. Everything is undone at the end of the block::

    with megatron_on_cpu():
        model = GPTModel(...)
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["megatron_on_cpu"]


def _uncompiled(function: Callable[..., Any] | None = None, **_: Any) -> Any:
    return function if function is not None else _uncompiled


# Megatron compiles its small fusions when it is imported; on a CPU that costs more than it ever gives back. It also
# warns of everything that it would like to have.
with mock.patch.object(torch, "compile", _uncompiled), warnings.catch_warnings(action="ignore"):
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import multi_latent_attention, torch_norm
    from megatron.core.transformer.moe import moe_utils


class _CudaMeansCpu(TorchFunctionMode):
    """`device="cuda"`, `.to("cuda")` and `.cuda()` stay on the CPU, and tensor types read as if on a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.cuda:
            return args[0]
        kwargs = {name: _on_cpu(value) if name == "device" else value for name, value in (kwargs or {}).items()}
        kwargs.pop("pin_memory", None)
        if func is Tensor.to:
            args = tuple(_on_cpu(value) for value in args)
        result = func(*args, **kwargs)
        if func is Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.")
        return result


def _on_cpu(value: Any) -> Any:
    named = isinstance(value, str) and value.startswith("cuda")
    return "cpu" if named or (isinstance(value, torch.device) and value.type == "cuda") else value


_new_group = dist.new_group


def _shared_group(ranks: list[int] | None = None, *, use_local_synchronization: bool = False, **_: Any) -> Any:
    """One group for all purposes that the same ranks have: gloo keeps a group's threads, and Megatron makes dozens."""
    return _group_of(None if ranks is None else tuple(ranks), use_local_synchronization)


@functools.cache
def _group_of(ranks: tuple[int, ...] | None, local: bool) -> Any:
    return _new_group(ranks, use_local_synchronization=local)


@contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """Run Megatron-Core on the CPU inside the block, with gloo."""
    cuda = {
        "current_device": lambda: torch.device("cpu"),
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
        "manual_seed": torch.manual_seed,
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "current_stream": lambda *_: mock.MagicMock(),
        "default_stream": lambda *_: mock.MagicMock(),
        "stream": lambda *_: nullcontext(),
        "Stream": mock.MagicMock,
        "Event": mock.MagicMock,
    }
    with ExitStack() as stack:
        for name, replacement in cuda.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, replacement))
        stack.enter_context(mock.patch.object(dist, "new_group", _shared_group))
        stack.enter_context(mock.patch.object(dist, "destroy_process_group"))
        stack.enter_context(mock.patch.object(random, "_get_cuda_rng_state", cuda["get_rng_state"]))
        stack.enter_context(mock.patch.object(random, "_set_cuda_rng_state", cuda["set_rng_state"]))
        # Some releases find Transformer Engine by what they import from their own wrappers, which is always there.
        stack.enter_context(mock.patch.object(multi_latent_attention, "HAVE_TE", False))
        stack.enter_context(mock.patch.object(moe_utils, "te_general_gemm", None, create=True))
        stack.enter_context(mock.patch.object(torch_norm.WrappedTorchNorm, "__new__", _norm))
        stack.enter_context(_CudaMeansCpu())
        yield


def _norm(cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> torch.nn.Module:
    """Torch's norms, with the mark that Megatron's own norms carry: their gradients are summed over TP with SP."""
    norm_class = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
    norm = norm_class(hidden_size, eps=eps)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return norm
