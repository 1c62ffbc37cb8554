from __future__ import annotations

import torch

from laga_attn.plan.memory import MemoryLog

KIB = 1024


def _new(log: MemoryLog, kib: int, name: str = "op") -> torch.Tensor:
    tensor = torch.zeros(kib * KIB, dtype=torch.uint8)
    log.watch(tensor, name)
    return tensor


def test_a_storage_counts_once_and_as_long_as_a_view_of_it_lives():
    log = MemoryLog()
    tensor = _new(log, 4)
    view = tensor[:10].view(2, 5)
    log.watch(view, "view")
    assert log.live_bytes() == 4 * KIB
    del tensor
    assert log.live_bytes() == 4 * KIB
    del view
    assert log.live_bytes() == 0
    assert [block.made_by for block in log.blocks] == ["op"]


def test_the_peak_is_the_most_that_lived_at_once():
    log = MemoryLog()
    first = _new(log, 3, "first")
    second = _new(log, 5, "second")
    del first
    third = _new(log, 2, "third")
    peak = log.peak()
    assert peak.nbytes == 8 * KIB
    assert [(block.made_by, size) for block, size in peak.top] == [("second", 5 * KIB), ("first", 3 * KIB)]
    assert log.live_bytes() == second.nbytes + third.nbytes == 7 * KIB


def test_a_storage_that_grows_or_shrinks_counts_at_its_size():
    log = MemoryLog()
    tensor = _new(log, 4)
    tensor.untyped_storage().resize_(6 * KIB)
    log.watch(tensor, "later")
    assert log.live_bytes() == 6 * KIB
    tensor.untyped_storage().resize_(0)
    log.watch(tensor, "later")
    assert (log.live_bytes(), log.peak().nbytes) == (0, 6 * KIB)
    del tensor
    assert log.live_bytes() == 0


def test_a_tensor_that_takes_the_place_of_another_counts_instead_of_it():
    log = MemoryLog()
    old = _new(log, 4)
    new = torch.zeros(4 * KIB, dtype=torch.uint8)
    log.hand_over(old, new, "wait")
    assert log.live_bytes() == 4 * KIB
    log.hand_over(new, new.view(2, -1), "wait")
    assert log.live_bytes() == 4 * KIB
    del old
    assert log.live_bytes() == 4 * KIB
    del new
    assert log.live_bytes() == 0


def test_categories_follow_from_what_was_said_and_from_how_long_a_block_lived():
    log = MemoryLog()
    weight = _new(log, 1, "weight")
    log.watch(weight, "weight").category = "parameter"
    temporary = _new(log, 16, "forward temporary")
    kept = _new(log, 2, "kept")
    del temporary
    log.start_backward()
    gradient = _new(log, 4, "gradient")
    scratch = _new(log, 8, "scratch")
    del scratch
    log.watch(gradient, "gradient").category = "gradient"
    assert {block.made_by: log.category_of(block) for block in log.blocks} == {
        "weight": "parameter",
        "forward temporary": "forward temporary",
        "kept": "saved",
        "gradient": "gradient",
        "scratch": "backward temporary",
    }
    assert log.peak().by_category == {"parameter": KIB, "saved": 2 * KIB, "forward temporary": 16 * KIB}
    late = {"parameter": KIB, "saved": 2 * KIB, "gradient": 4 * KIB, "backward temporary": 8 * KIB}
    assert log.peak(without=("forward temporary",)).by_category == late
    assert log.at_backward_start(without=("parameter",)).by_category == {"saved": kept.nbytes}


def test_a_log_without_events_has_no_peak():
    peak = MemoryLog().peak()
    assert (peak.nbytes, peak.top) == (0, ())
