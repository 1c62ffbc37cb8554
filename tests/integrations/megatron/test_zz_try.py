import time
from tests.integrations.megatron.models import *
from tests.integrations.megatron.world import Parallel, megatron_ranks
from tests.compare import relative_error
import torch
def run(ctx, model, batch, parallel):
    with megatron_ranks(parallel):
        s = step_of(model, batch, parallel)
    return (s if ctx.rank==0 else None)
def show(a,b):
    print("logits",relative_error(a.logits,b.logits),"loss",relative_error(a.loss[None],b.loss[None]))
    for n in b.grads:
        e = relative_error(a.grads[n],b.grads[n])
        if e>1e-5: print("   ",n,e)
    print("max grad", max(relative_error(a.grads[n],b.grads[n]) for n in b.grads))
def test_x(ranks):
    ref = ranks(4).run(run, Model(scheme=None), Batch(), Parallel())[0]
    for par in (Parallel(tp=2), Parallel(tp=2,sequence_parallel=True)):
        for sch in (None,"laga"):
            s = ranks(4).run(run, Model(scheme=sch), Batch(), par)[0]
            print(par, sch); show(s,ref)
    for batch in (Batch(lengths=(5,9,14),packed=True),):
        ref = ranks(4).run(run, Model(scheme=None), batch, Parallel())[0]
        for par in (Parallel(), Parallel(cp=2), Parallel(cp=4), Parallel(tp=2,cp=2,sequence_parallel=True)):
            s = ranks(4).run(run, Model(), batch, par)[0]
            print(par); show(s,ref)
