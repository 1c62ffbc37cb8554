"""ContextParallel: any group becomes a U x G grid, and what does not fit is refused in words."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from laga_attn.collectives import all_gather_rows
from laga_attn.grid import ContextParallel


def _gathered_global_ranks(cp):
    mine = torch.tensor([dist.get_rank()])
    return all_gather_rows(mine, cp, kind="latent", phase="forward").wait().tolist()


def describes_the_grid(ctx, degree):
    cp = ContextParallel(ctx.group, degree)
    places = [(cp.locate(rank), cp.ulysses_ranks(rank)) for rank in range(cp.size)]
    return cp.rank, cp.size, cp.ulysses_degree, cp.backend, cp.backend_for("cpu"), places


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_rank_r_is_member_r_mod_u_of_group_r_div_u(ranks, size):
    for degree in (d for d in range(1, size + 1) if size % d == 0):
        for rank, described in enumerate(ranks(size).run(describes_the_grid, degree)):
            *facts, places = described
            assert facts == [rank, size, degree, "gloo", "gloo"]
            for r, (place, members) in enumerate(places):
                assert place == (r // degree, r % degree)
                assert members == tuple(p for p in range(size) if p // degree == r // degree)


def leaves_the_degree_open(ctx):
    cp = ContextParallel(ctx.group)
    return cp.ulysses_degree, cp.locate(1), cp.ulysses_ranks(1)


def test_an_open_degree_is_none_and_reads_like_1(ranks):
    assert ranks(2).run(leaves_the_degree_open) == [(None, (1, 0), (1,))] * 2


def gathers_in_a_strided_group(ctx):
    pairs = [dist.new_group(pair) for pair in ([0, 2], [3, 1])]  # torch sorts the second one
    cp = ContextParallel(pairs[ctx.rank % 2], 2)
    return cp.rank, cp.size, cp.ulysses_ranks(cp.rank), _gathered_global_ranks(cp)


def test_strided_groups_that_do_not_start_at_0_are_counted_from_inside(ranks):
    even, odd = [0, 2], [1, 3]
    expected = [(r // 2, 2, (0, 1), odd if r % 2 else even) for r in range(4)]
    assert ranks(4).run(gathers_in_a_strided_group) == expected


def gathers_in_a_mesh_slice(ctx):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    cp = ContextParallel(mesh["cp"], ulysses_degree=2)
    return cp.rank, cp.size, _gathered_global_ranks(cp)


def test_a_slice_of_a_mesh_is_the_group_of_that_dimension(ranks):
    assert ranks(4).run(gathers_in_a_mesh_slice) == [
        (0, 2, [0, 1]),
        (1, 2, [0, 1]),
        (0, 2, [2, 3]),
        (1, 2, [2, 3]),
    ]


def takes_a_whole_2d_mesh(ctx):
    ContextParallel(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp")))


def test_a_2d_mesh_is_refused_and_told_how_to_slice(ranks):
    (text, *_) = ranks(4).run_raises(takes_a_whole_2d_mesh)
    assert "2 dimensions" in text
    assert 'mesh["cp"]' in text


def takes_a_group_without_this_rank(ctx):
    group = dist.new_group([0, 1])
    try:
        ContextParallel(group)
    except ValueError as error:
        return str(error)
    return "accepted"


def test_a_process_outside_the_group_is_refused(ranks):
    inside_0, inside_1, outside_2, outside_3 = ranks(4).run(takes_a_group_without_this_rank)
    assert inside_0 == inside_1 == "accepted"
    assert "global rank 2" in outside_2
    assert "not a member" in outside_2
    assert "global rank 3" in outside_3


def asks_for_degree(ctx, degree):
    ContextParallel(ctx.group, degree)


@pytest.mark.parametrize("degree", [0, -1, 3, 8, True, 2.5])
def test_a_degree_that_does_not_divide_p_is_refused_with_the_valid_ones(ranks, degree):
    (text, *_) = ranks(4).run_raises(asks_for_degree, degree)
    assert f"ulysses_degree={degree}" in text
    assert "4 context-parallel ranks" in text
    assert "[1, 2, 4]" in text


def misuses(ctx, what):
    if what == "check":
        ContextParallel(ctx.group, check="sometimes")
    ContextParallel(ctx.group).locate(ctx.size)


def test_an_unknown_check_and_a_rank_outside_are_refused(ranks):
    ranks(2).run_raises(misuses, "check", match="check='sometimes'.*auto, always, new")
    ranks(2).run_raises(misuses, "rank", match="rank 2 is not in a group of 2; use 0 to 1")


@pytest.mark.parametrize("group", [None, "cp", 1])
def test_what_is_no_group_is_refused_and_told_what_to_pass(group):
    with pytest.raises(ValueError, match=r"ProcessGroup or a 1-D DeviceMesh, not .*ContextParallel\.none\(\)"):
        ContextParallel(group)


def test_one_process_needs_no_group():
    cp = ContextParallel.none()
    assert (cp.group, cp.rank, cp.size, cp.ulysses_degree, cp.backend) == (None, 0, 1, None, "none")
    assert cp.with_ulysses(1).ulysses_degree == 1
    with pytest.raises(ValueError, match=r"ulysses_degree=2 does not divide the 1 context-parallel ranks.*\[1\]"):
        cp.with_ulysses(2)


def changes_the_degree(ctx):
    cp = ContextParallel(ctx.group, 1, check="new", two_level=True, overlap=False, flops_per_port_byte=5.0)
    cp.remember_agreed(b"known")
    other = cp.with_ulysses(2)
    kept = (other.check, other.two_level, other.overlap, other.has_agreed(b"known"), other.group is cp.group)
    assert other.flops_per_port_byte == 5.0
    return cp.ulysses_degree, other.ulysses_degree, kept


def test_with_ulysses_changes_only_the_degree_of_a_new_grid(ranks):
    assert ranks(2).run(changes_the_degree) == [(1, 2, ("new", True, False, True, True))] * 2


def test_the_memory_of_agreements_is_bounded():
    cp = ContextParallel.none()
    digests = [i.to_bytes(4, "big") for i in range(5000)]
    for digest in digests:
        cp.remember_agreed(digest)
    assert cp.has_agreed(digests[-1])
    assert not cp.has_agreed(digests[0])
    assert sum(map(cp.has_agreed, digests)) == 4096


def copies_a_module(ctx):
    module = torch.nn.Linear(1, 1)
    module.cp = ContextParallel(ctx.group)
    return copy.deepcopy(module).cp is module.cp and copy.copy(module.cp) is module.cp


def test_modules_that_hold_a_grid_can_be_deep_copied(ranks):
    assert ranks(2).run(copies_a_module) == [True, True]


def test_a_grid_is_read_only():
    with pytest.raises(AttributeError):
        ContextParallel.none().size = 2
    with pytest.raises(AttributeError):
        ContextParallel.none().anything = 2
