"""FLOPs and memory traffic of one operator call, from its arguments and results.

PyTorch's own formulas are the base. They miss in-place and matrix-vector forms, grouped products and attention on CPU,
and count causal attention as if nothing were hidden; here every visible (query, key) pair counts, and no other.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from laga_attn.spans import Span

__all__ = ["Part", "count_flops", "moved_bytes", "part_of", "tensors_in"]

Part = Literal["attention", "expansion", "projection"]
"""Attention itself; products with `kv_b_proj.weight` inside a scheme; all other products of a layer."""

Formula = Callable[..., int]
_LIBRARY: Final = "laga_attn"
_SCHEMES: Final = "laga_attn.schemes."
_ALLOCATE_ONLY: Final = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided")
_PICKS: Final = ("index_select", "index", "gather", "embedding")
_WRITES_ROWS: Final = ("index_add_", "index_copy_", "scatter_", "scatter_add_")


def count_flops(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int | None:
    """FLOPs of one call, a multiply-add being two; None if nothing is known about this operator."""
    own = _OWN_FORMULAS.get(_base_name(func))
    if own is not None:
        return own(*args, **kwargs)
    formula = flop_registry.get(func.overloadpacket) or _of_functional_form(func)
    return None if formula is None else int(formula(*args, **kwargs, out_val=result))


def part_of(func: Any) -> Part:
    """Which part of a layer a product belongs to: the code that called it tells."""
    if func.namespace == _LIBRARY:
        return "attention"
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(_SCHEMES):
            return "expansion"
        frame = frame.f_back  # type: ignore[assignment]
    return "projection"


def moved_bytes(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    """Bytes that an operator (not a view) reads and writes if each argument and result passes through memory once.

    Of a tensor that is indexed, only the rows that are picked or written count.
    """
    name = _base_name(func)
    if name in _ALLOCATE_ONLY:
        return 0
    results = sum(tensor.nbytes for tensor in tensors_in((result,)))
    if name in _PICKS:
        return 2 * results
    if name in _WRITES_ROWS:  # (target, dim, index, source): the source is read, its rows are read and written
        source = next(tensor for tensor in reversed(tensors_in(args)) if tensor.is_floating_point())
        return 3 * source.nbytes
    return results + sum(tensor.nbytes for tensor in tensors_in((*args, *kwargs.values())))


def tensors_in(values: Sequence[Any]) -> list[Tensor]:
    """Tensors among values and in the lists and tuples among them."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend(tensors_in(value))
    return found


def _base_name(func: Any) -> str:
    name: str = func.overloadpacket.__name__
    return name


def _of_functional_form(func: Any) -> Formula | None:
    """`addmm_` does the work of `addmm`."""
    name = _base_name(func)
    if func.namespace != "aten" or not name.endswith("_") or name.startswith("_"):
        return None
    packet = getattr(torch.ops.aten, name.rstrip("_"), None)
    return None if packet is None else flop_registry.get(packet)


def _vector_product(matrix_at: int) -> Formula:
    """Matrix-vector forms: two FLOPs per element of the matrix (or first vector)."""
    return lambda *args, **_: 2 * args[matrix_at].numel()


def _outer_product(bias: Tensor, left: Tensor, right: Tensor, **_: Any) -> int:
    return 2 * left.numel() * right.numel()


def _grouped_product(left: Tensor, right: Tensor, *_: Any, **__: Any) -> int:
    """Rows of `left` each meet one group's matrix; where rows are ragged, one GEMM per group has the rows of all."""
    if left.dim() == 2 and right.dim() == 2:  # the shared dimension is what is cut into groups
        return 2 * left.shape[0] * left.shape[1] * right.shape[1]
    rows = math.prod(left.shape[:-1])
    return 2 * rows * left.shape[-1] * right.shape[-1]


def _causal_at(position: int) -> Callable[[Sequence[Any], Mapping[str, Any]], bool]:
    return lambda args, kwargs: bool(args[position] if len(args) > position else kwargs.get("is_causal", False))


def _sdpa(causal_at: int, *, backward: bool) -> Formula:
    """`[B, H, S, D]` attention: visible pairs of a mask that is aligned top-left."""
    is_causal, first = _causal_at(causal_at), 1 if backward else 0

    def formula(*args: Any, **kwargs: Any) -> int:
        query, key, value = args[first : first + 3]
        batch, heads, queries, width = query.shape
        keys, v_width = key.shape[2], value.shape[3]
        pairs = queries * keys
        if is_causal(args, kwargs):
            seen = min(queries, keys)  # later queries see every key
            pairs = Span(0, seen, 0, seen, causal=True).area() + (queries - seen) * keys
        widths = 3 * width + 2 * v_width if backward else width + v_width
        return int(2 * batch * heads * pairs * widths)

    return formula


_OWN_FORMULAS: Final[Mapping[str, Formula]] = {
    "mv": _vector_product(0),
    "dot": _vector_product(0),
    "vdot": _vector_product(0),
    "addmv": _vector_product(1),
    "addmv_": _vector_product(1),
    "addr": _outer_product,
    "addr_": _outer_product,
    "_grouped_mm": _grouped_product,
    "_scaled_dot_product_flash_attention_for_cpu": _sdpa(4, backward=False),
    "_scaled_dot_product_flash_attention_for_cpu_backward": _sdpa(7, backward=True),
    "_scaled_dot_product_flash_attention": _sdpa(4, backward=False),
    "_scaled_dot_product_efficient_attention": _sdpa(6, backward=False),
    "_scaled_dot_product_efficient_attention_backward": _sdpa(11, backward=True),
}
