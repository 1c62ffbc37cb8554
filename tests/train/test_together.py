from __future__ import annotations

import torch
import torch.distributed as dist

from laga_attn.train.errors import UsageError
from laga_attn.train.together import everywhere, on_first_rank, reduce, same_everywhere


def refuse_on_rank_2(ctx):
    def action():
        if ctx.rank == 2:
            raise UsageError("only rank 2 minds")
        return ctx.rank

    return everywhere(action)


def fail_on_first(ctx):
    def action():
        raise OSError(f"disk full on {ctx.rank}")

    return on_first_rank(action)


def agree(ctx):
    return (
        everywhere(lambda: ctx.rank * 10),
        on_first_rank(lambda: ("of rank", ctx.rank)),
        same_everywhere("equal"),
        same_everywhere(ctx.rank // 3),
        reduce([ctx.rank, 0.5], dist.ReduceOp.SUM, torch.device("cpu")),
        reduce([ctx.rank, -ctx.rank], dist.ReduceOp.MAX, torch.device("cpu")),
    )


def test_a_refusal_of_one_rank_is_raised_on_all(ranks):
    ranks(4).run_raises(refuse_on_rank_2, error=UsageError, match="only rank 2 minds")


def test_a_failure_of_the_first_rank_is_raised_on_all(ranks):
    ranks(4).run_raises(fail_on_first, error=OSError, match="disk full on 0")


def test_results_of_common_steps(ranks):
    for rank, result in enumerate(ranks(4).run(agree)):
        assert result == (rank * 10, ("of rank", 0), True, False, [6.0, 2.0], [3.0, 0.0])
