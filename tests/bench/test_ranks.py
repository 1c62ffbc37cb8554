from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from laga_attn.bench.ranks import run_on_ranks


def add_up(offset: int) -> tuple[int, int, float]:
    total = torch.tensor(float(dist.get_rank() + offset))
    dist.all_reduce(total)
    return dist.get_rank(), torch.get_num_threads(), total.item()


def fail_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise OSError("rank 1 cannot")


def test_results_come_in_rank_order_from_one_group_with_one_thread_each():
    assert run_on_ranks(add_up, 2, 10) == [(0, 1, 21.0), (1, 1, 21.0)]


def test_a_failing_rank_is_reported_with_its_message():
    with pytest.raises(Exception, match="rank 1 cannot"):
        run_on_ranks(fail_on_rank_1, 2)
