from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from laga_attn.bench import ranks
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


@pytest.mark.parametrize(("gpus", "backend", "gpu"), [(8, "cpu:gloo,cuda:nccl", 3), (2, "cpu:gloo,cuda:gloo", 1)])
def test_ranks_get_a_gpu_each_with_nccl_or_share_them_with_gloo(monkeypatch, tmp_path, gpus, backend, gpu):
    """Rank 3 of 4, with everything that needs a device noted down instead."""
    said = {}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: said.update(gpu=index))
    monkeypatch.setattr(dist, "init_process_group", lambda name, **_: said.update(backend=name))
    for name in ("barrier", "destroy_process_group"):
        monkeypatch.setattr(dist, name, lambda: None)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    threads = torch.get_num_threads()
    try:
        ranks._run_rank(3, 4, tmp_path, 2, "cuda", None, torch.get_num_threads, ())
    finally:
        torch.set_num_threads(threads)
    assert said == {"gpu": gpu, "backend": backend}
    assert torch.load(tmp_path / "result-3") == 2


ORPHANS = """
import os, signal, time
from laga_attn.bench.ranks import run_on_ranks

def announce():
    os.write(1, b"started\\n")  # in one piece
    time.sleep(60)

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as under nohup
    run_on_ranks(announce, 2)
"""


def test_ranks_end_with_a_parent_that_is_killed(tmp_path):
    script = tmp_path / "orphans.py"
    script.write_text(ORPHANS)
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as parent:
        assert [parent.stdout.readline() for _ in range(2)] == ["started\n"] * 2
        parent.kill()
        rest, _ = parent.communicate(timeout=50)  # the pipe has an end when nobody holds it any more
    assert rest == ""
