"""ContextParallel: the processes that share a sequence, as a grid of Ulysses groups."""

from __future__ import annotations

import math
from typing import Literal, Self, TypeAlias, get_args

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Check", "ContextParallel"]

Check: TypeAlias = Literal["auto", "always", "new"]

# Enough for every shape of a real run; a run with endless shapes forgets the oldest, on all ranks alike.
_MAX_REMEMBERED = 4096


class ContextParallel:
    """One context-parallel group of P ranks, read as a grid of G = P / U Ulysses groups of U ranks.

    Rank r is member ``r % U`` of Ulysses group ``r // U``: consecutive ranks exchange heads. Ranks are
    counted inside the group (0 .. P-1), whatever their global numbers are. No subgroup is created: Ulysses
    exchanges run over the whole group, with zero rows for ranks of other Ulysses groups.

    Args:
        cp_group: the processes that share a sequence: a ``ProcessGroup`` that this process belongs to, or a
            1-D ``DeviceMesh``. For a single process without a group use :meth:`none`.
        ulysses_degree: U, a divisor of P. ``None`` means 1, and leaves ``scheme="auto"`` free to choose.
        check: when the ranks compare their arguments before attention (:func:`laga_attn.agreement.agree`):
            ``"always"`` on every call, ``"new"`` only for arguments not seen before, ``"auto"`` (default) on
            every call of a CPU group and for new arguments on a device group, where comparing waits for the
            device.
        two_level: gather latents first between ranks of the same place in each Ulysses group, then inside the
            group: the same bytes per port, but where Ulysses groups are nodes each latent enters a node once
            instead of U times. Gradients return the same way, rounded to the input dtype once on each level. Not for
            the explicit scheme, which sends no latents.
        overlap: False makes every collective finish where it starts. Same numbers; for measuring what
            overlap hides.
        flops_per_port_byte: FLOPs that a rank does while one byte passes its port, which ``scheme="auto"`` weighs
            schemes with: throughput of attention over bandwidth of the slowest link that the ranks share. ``None``
            takes :data:`laga_attn.auto.FLOPS_PER_PORT_BYTE`, on CPUs ``CPU_FLOPS_PER_PORT_BYTE``; with fp32 half of
            it.

    Instances are read-only and compare by identity. ``copy`` and ``copy.deepcopy`` return the same instance
    (process groups cannot be copied), so modules that hold one can be copied.

    Raises:
        ValueError: no group, a mesh that is not 1-D, a process outside the group, a degree that does not
            divide P, an unknown ``check``, a ``flops_per_port_byte`` that is not positive.
    """

    __slots__ = (
        "_agreed",
        "_backends",
        "_check",
        "_flops_per_port_byte",
        "_group",
        "_overlap",
        "_rank",
        "_size",
        "_two_level",
        "_ulysses_degree",
    )

    def __init__(
        self,
        cp_group: dist.ProcessGroup | DeviceMesh,
        ulysses_degree: int | None = None,
        *,
        check: Check = "auto",
        two_level: bool = False,
        overlap: bool = True,
        flops_per_port_byte: float | None = None,
    ) -> None:
        if flops_per_port_byte is not None and not 0 < flops_per_port_byte < math.inf:
            raise ValueError(f"flops_per_port_byte must be positive, got {flops_per_port_byte}")
        if check not in get_args(Check):
            raise ValueError(f"check={check!r} is unknown; choose one of {', '.join(get_args(Check))}")
        group = _joined_group(cp_group)
        self._group: dist.ProcessGroup | None = group
        self._rank = dist.get_rank(group)
        self._size = dist.get_world_size(group)
        self._backends = _backend_of_each_device(group)
        self._check: Check = check
        self._two_level, self._overlap = two_level, overlap
        self._flops_per_port_byte = flops_per_port_byte
        self._ulysses_degree = _valid_degree(ulysses_degree, self._size)
        self._agreed: dict[bytes, None] = {}

    @classmethod
    def none(cls) -> Self:
        """The grid of a process that works alone: P = 1, no group, no communication."""
        self = cls.__new__(cls)
        self._group, self._rank, self._size = None, 0, 1
        self._backends, self._check = {}, "auto"
        self._two_level, self._overlap, self._flops_per_port_byte = False, True, None
        self._ulysses_degree = None
        self._agreed = {}
        return self

    def with_ulysses(self, ulysses_degree: int | None) -> ContextParallel:
        """The same group with another ``ulysses_degree``; what its ranks agreed on stays remembered."""
        if self._group is None:
            other = ContextParallel.none()
            other._ulysses_degree = _valid_degree(ulysses_degree, 1)
        else:
            other = ContextParallel(
                self._group,
                ulysses_degree,
                check=self._check,
                two_level=self._two_level,
                overlap=self._overlap,
                flops_per_port_byte=self._flops_per_port_byte,
            )
        other._agreed = self._agreed
        return other

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group, ``None`` for :meth:`none`."""
        return self._group

    @property
    def size(self) -> int:
        """P, the number of ranks that share a sequence."""
        return self._size

    @property
    def rank(self) -> int:
        """This process's rank inside the group, 0 .. P-1."""
        return self._rank

    @property
    def ulysses_degree(self) -> int | None:
        """U as given; ``None`` if it was left open (then 1 unless ``scheme="auto"`` chooses)."""
        return self._ulysses_degree

    @property
    def check(self) -> Check:
        """When the ranks compare their arguments, as given."""
        return self._check

    @property
    def two_level(self) -> bool:
        """Whether latents travel between Ulysses groups first and inside them second."""
        return self._two_level

    @property
    def overlap(self) -> bool:
        """Whether collectives run beside computation."""
        return self._overlap

    @property
    def flops_per_port_byte(self) -> float | None:
        """What ``scheme="auto"`` weighs schemes with, as given."""
        return self._flops_per_port_byte

    @property
    def backend(self) -> str:
        """The group's backend, such as ``"gloo"`` or ``"nccl"``; ``"none"`` without a group.

        A group with several backends reads like ``"cpu:gloo,cuda:nccl"``.
        """
        names = set(self._backends.values())
        if len(names) <= 1:
            return next(iter(names), "none")
        return ",".join(f"{device}:{name}" for device, name in self._backends.items())

    def backend_for(self, device_type: str) -> str | None:
        """The backend that moves tensors of a device type (``"cpu"``, ``"cuda"``), ``None`` if none does."""
        return self._backends.get(device_type)

    def locate(self, rank: int) -> tuple[int, int]:
        """``(r // U, r % U)``: the Ulysses group of a rank and its place inside that group."""
        if not 0 <= rank < self._size:
            raise ValueError(f"rank {rank} is not in a group of {self._size}; use 0 to {self._size - 1}")
        return divmod(rank, self._ulysses_degree or 1)

    def ulysses_ranks(self, rank: int) -> tuple[int, ...]:
        """The U ranks of a rank's Ulysses group, in order, the rank itself included."""
        degree = self._ulysses_degree or 1
        first = self.locate(rank)[0] * degree
        return tuple(range(first, first + degree))

    def has_agreed(self, digest: bytes) -> bool:
        """Whether the ranks are known to agree on the arguments with this digest."""
        return digest in self._agreed

    def remember_agreed(self, digest: bytes) -> None:
        """Remember that the ranks agree on the arguments with this digest."""
        self._agreed[digest] = None
        if len(self._agreed) > _MAX_REMEMBERED:
            del self._agreed[next(iter(self._agreed))]

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __repr__(self) -> str:
        return (
            f"ContextParallel(size={self._size}, rank={self._rank}, "
            f"ulysses_degree={self._ulysses_degree}, backend={self.backend!r})"
        )


def _joined_group(cp_group: object) -> dist.ProcessGroup:
    """The process group behind ``cp_group``, which this process must be part of."""
    if isinstance(cp_group, DeviceMesh):
        if cp_group.ndim != 1:
            names = cp_group.mesh_dim_names or ()
            example = f'mesh["{"cp" if "cp" in names or not names else names[-1]}"]'
            raise ValueError(
                f"the device mesh has {cp_group.ndim} dimensions {names} of sizes {tuple(cp_group.shape)}, "
                f"but context parallelism runs over exactly one; slice it first, e.g. {example}"
            )
        if cp_group.get_coordinate() is None:
            raise ValueError(f"this process is not part of the device mesh {cp_group}; use the mesh it is in")
        return cp_group.get_group()
    # torch hands a plain integer, not a group, to processes outside a new group.
    outside = cp_group == dist.GroupMember.NON_GROUP_MEMBER
    if outside or (isinstance(cp_group, dist.ProcessGroup) and dist.get_rank(cp_group) < 0):
        raise ValueError(
            f"this process (global rank {dist.get_rank()}) is not a member of cp_group; "
            "give every process the group that it belongs to itself"
        )
    if not isinstance(cp_group, dist.ProcessGroup):
        raise ValueError(
            f"cp_group must be a ProcessGroup or a 1-D DeviceMesh, not {type(cp_group).__name__}; "
            "use dist.group.WORLD (after init_process_group) for all processes, "
            "or ContextParallel.none() for a process that works alone"
        )
    return cp_group


def _backend_of_each_device(group: dist.ProcessGroup) -> dict[str, str]:
    """Parse torch's ``"cpu:gloo,cuda:nccl"`` into ``{"cpu": "gloo", "cuda": "nccl"}``."""
    devices = dist.get_backend_config(group).split(",")
    return {device: name for device, _, name in (entry.partition(":") for entry in devices)}


def _valid_degree(ulysses_degree: int | None, size: int) -> int | None:
    if ulysses_degree is None:
        return None
    valid = [d for d in range(1, size + 1) if size % d == 0]
    if isinstance(ulysses_degree, bool) or ulysses_degree not in valid:
        raise ValueError(
            f"ulysses_degree={ulysses_degree} does not divide the {size} context-parallel ranks; choose one of {valid}"
        )
    return ulysses_degree
