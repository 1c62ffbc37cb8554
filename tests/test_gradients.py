"""Losses and gradients over dp x cp ranks must equal those of one process that sees every token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from laga_attn.gradients import load_balancing_loss, reduce_gradients, token_mean_loss
from laga_attn.layout import SequenceLayout
from tests.compare import assert_bitwise, assert_close

VOCAB = 11


class TokenModel(nn.Module):
    """Predicts from one token and its position; what the ranks hold needs no communication."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, 6)
        self.positions = nn.Embedding(32, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, VOCAB)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        return self.head(self.norm(self.tokens(ids) + self.positions(positions)).tanh())


def model_and_batch(n_valid: tuple[int, ...] = (23, 9)) -> tuple[TokenModel, Tensor, Tensor]:
    """The same on every rank: a model, tokens `[2, 24]` and labels, of which `n_valid` count in each row."""
    torch.manual_seed(3)
    model = TokenModel().double()
    tokens = torch.randint(VOCAB, (2, 24))
    labels = SequenceLayout.contiguous(24, 1).shard_lm(tokens, 0).labels
    for row, count in zip(labels, n_valid, strict=True):
        row[count:] = -100
    return model, tokens, labels


def one_process(n_valid: tuple[int, ...] = (23, 9)) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean loss over all valid tokens and its gradients, computed without this package's help."""
    model, tokens, labels = model_and_batch(n_valid)
    logits = model(tokens, torch.arange(24).expand(2, -1))
    loss = cross_entropy(logits.reshape(-1, VOCAB), labels.reshape(-1))
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def share_of_batch(tokens, labels, ctx, cp_size):
    """Tokens, positions and labels of one rank of a dp x cp grid: dp splits rows, cp splits the sequence."""
    layout = SequenceLayout.zigzag(24, cp_size)
    dp_rank, cp_rank = divmod(ctx.rank, cp_size)
    rows = slice(dp_rank, None, ctx.size // cp_size)
    ids = layout.shard(tokens[rows], cp_rank)
    return ids, layout.positions(cp_rank).expand_as(ids), layout.shard(labels[rows], cp_rank, pad_value=-100)


def loss_of(model, ids, positions, labels, group):
    logits = model(ids, positions)
    loss_sum = cross_entropy(logits.reshape(-1, VOCAB), labels.reshape(-1), reduction="sum")
    return token_mean_loss(loss_sum, (labels != -100).sum(), group)


def train_step(ctx, cp_size, n_valid):
    model, tokens, labels = model_and_batch(n_valid)
    loss = loss_of(model, *share_of_batch(tokens, labels, ctx, cp_size), ctx.group)
    loss.backward()
    reduce_gradients(model, ctx.group)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}, norm


@pytest.mark.parametrize(("dp", "cp"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_gradients_do_not_depend_on_how_dp_and_cp_split_the_ranks(ranks, dp, cp):
    expected_loss, expected = one_process()
    expected_norm = torch.stack([grad.norm() for grad in expected.values()]).norm()
    results = ranks(dp * cp).run(train_step, cp, (23, 9))
    assert_close(sum(loss for loss, _, _ in results), expected_loss, rel=1e-13)
    for _, grads, norm in results:
        assert_close(norm, expected_norm, rel=1e-13)
        for name, grad in expected.items():
            assert_close(grads[name], grad, rel=1e-12, name=name)


@pytest.mark.parametrize("n_valid", [(10, 2), (12, 0)])
def test_uneven_valid_tokens_weigh_the_same(ranks, n_valid):
    """dp = 2 gives each rank one row: 10 and 2 valid tokens, then a rank without any."""
    expected_loss, expected = one_process(n_valid)
    results = ranks(2).run(train_step, 1, n_valid)
    assert_close(sum(loss for loss, _, _ in results), expected_loss, rel=1e-13)
    for name, grad in expected.items():
        assert_close(results[0][1][name], grad, rel=1e-12, name=name)


def test_no_valid_token_at_all_gives_zero(ranks):
    for loss, grads, _ in ranks(2).run(train_step, 2, (0, 0)):
        assert loss == 0
        assert all(grad.eq(0).all() for grad in grads.values())


def test_one_process_needs_no_process_group():
    model, tokens, labels = model_and_batch()
    loss = loss_of(model, tokens, torch.arange(24).expand(2, -1), labels, None)
    loss.backward()
    before = [p.grad.clone() for p in model.parameters()]
    reduce_gradients(model)
    assert_close(loss.detach(), one_process()[0], rel=1e-13)
    for p, grad in zip(model.parameters(), before, strict=True):
        assert_bitwise(p.grad, grad)


def ddp_step(ctx, cp_size):
    model, tokens, labels = model_and_batch()
    wrapped = DistributedDataParallel(model, process_group=ctx.group)
    loss = loss_of(wrapped, *share_of_batch(tokens, labels, ctx, cp_size), ctx.group)
    (loss * ctx.size).backward()  # DDP averages
    return {name: p.grad for name, p in model.named_parameters()}


def fsdp_step(ctx, cp_size, recipe):
    model, tokens, labels = model_and_batch()
    mesh = DeviceMesh.from_group(ctx.group, "cpu")
    for module in (model.tokens, model.head, model):
        fully_shard(module, mesh=mesh)
        if recipe == "divide factor":
            module.set_gradient_divide_factor(1.0)
    loss = loss_of(model, *share_of_batch(tokens, labels, ctx, cp_size), ctx.group)
    (loss * (ctx.size if recipe == "scaled loss" else 1)).backward()
    assert all(isinstance(p, DTensor) for p in model.parameters())
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}


@pytest.mark.parametrize("cp", [1, 2])
def test_ddp_recipe(ranks, cp):
    expected = one_process()[1]
    for grads in ranks(2).run(ddp_step, cp):
        for name, grad in expected.items():
            assert_close(grads[name], grad, rel=1e-12, name=name)


@pytest.mark.parametrize("recipe", ["scaled loss", "divide factor"])
@pytest.mark.parametrize("cp", [1, 2])
def test_fsdp2_recipes(ranks, cp, recipe):
    expected = one_process()[1]
    for grads in ranks(2).run(fsdp_step, cp, recipe):
        for name, grad in expected.items():
            assert_close(grads[name], grad, rel=1e-12, name=name)


def fsdp_then_reduce(ctx):
    model = fully_shard(nn.Linear(4, 4), mesh=DeviceMesh.from_group(ctx.group, "cpu"))
    reduce_gradients(model, ctx.group)


def test_sharded_gradients_are_refused(ranks):
    ranks(2).run_raises(fsdp_then_reduce, match="DTensor")


def random_parameters(rank: int, dtype: torch.dtype) -> list[nn.Parameter]:
    """Equal parameters with gradients of this rank; number 2 has one on rank 1 only, number 3 nowhere."""
    generator = torch.Generator().manual_seed(rank)
    parameters = [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in ((5, 3), (7,), (2, 2), (3,), ())]
    for number, parameter in enumerate(parameters):
        if number == 3 or (number == 2 and rank != 1):
            continue
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
    return parameters


def reduce_random(ctx, dtype, bucket_bytes):
    parameters = random_parameters(ctx.rank, dtype)
    reduce_gradients(iter(parameters), ctx.group, bucket_bytes=bucket_bytes)
    return [p.grad for p in parameters]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_gradients_are_summed_in_rank_order_and_rounded_once(ranks, size, dtype):
    per_rank = [random_parameters(rank, dtype) for rank in range(size)]
    for grads in ranks(size).run(reduce_random, dtype, 2**20):
        for number in (0, 1, 2, 4):
            total = torch.zeros(per_rank[0][number].shape)
            for parameters in per_rank:
                if parameters[number].grad is not None:
                    total = total + parameters[number].grad.float()
            assert_bitwise(grads[number], total.to(dtype), name=f"parameter {number}")
        assert grads[3] is None  # unused everywhere: an optimizer must not decay it


def test_bits_depend_neither_on_rank_nor_run_nor_buckets(ranks):
    first = ranks(4).run(reduce_random, torch.float32, 2**20)
    for bucket_bytes in (2**20, 1, 80):
        for grads in ranks(4).run(reduce_random, torch.float32, bucket_bytes):
            for number in (0, 1, 2, 4):
                assert_bitwise(grads[number], first[0][number])


def reduce_shared_frozen_and_mixed(ctx):
    """One weight used twice, a frozen one, and an fp64 one between fp32 ones."""
    tied = nn.Parameter(torch.zeros(3))
    frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
    fine = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    strided = nn.Parameter(torch.zeros(2, 3))
    tied.grad, frozen.grad = torch.full((3,), 1.0 + ctx.rank), torch.ones(2)
    fine.grad = torch.full((2,), 1e-12 if ctx.rank else 1.0, dtype=torch.float64)
    strided.grad = (torch.arange(6.0).view(3, 2) * (1 + ctx.rank)).T
    reduce_gradients([tied, frozen, fine, tied, strided], ctx.group)
    return tied.grad, frozen.grad, fine.grad, strided.grad


def test_tied_frozen_fp64_and_transposed_gradients(ranks):
    for tied, frozen, fine, strided in ranks(2).run(reduce_shared_frozen_and_mixed):
        assert tied.tolist() == [3.0] * 3
        assert frozen.tolist() == [1.0] * 2
        assert fine.tolist() == [1.0 + 1e-12] * 2
        assert_bitwise(strided, (3 * torch.arange(6.0).view(3, 2)).T.contiguous())


def reduce_faulty(ctx, fault):
    parameters = [nn.Parameter(torch.zeros(4, 2)), nn.Parameter(torch.zeros(3))]
    for p in parameters:
        p.grad = torch.ones_like(p)
    if ctx.rank == 1 and fault == "frozen":
        parameters[1].requires_grad_(False)
    if ctx.rank == 1 and fault == "all frozen":
        parameters = [p.requires_grad_(False) for p in parameters]
    if ctx.rank == 1 and fault == "shape":
        parameters[0] = nn.Parameter(torch.zeros(2, 4))
    if ctx.rank == 1 and fault == "sparse":
        parameters[0].grad = torch.ones(4, 2).to_sparse()
    reduce_gradients(parameters, ctx.group)


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("frozen", "number of trainable"),
        ("all frozen", "no parameter requires grad"),
        ("shape", "checksum"),
        ("sparse", "sparse"),
    ],
)
def test_ranks_that_cannot_reduce_together_all_raise(ranks, fault, text):
    ranks(2).run_raises(reduce_faulty, fault, match=text)


def loss_detached_on_one_rank(ctx):
    weight = nn.Parameter(torch.ones(()))
    token_mean_loss(weight * 2 if ctx.rank == 0 else torch.zeros(()), 3 * (1 - ctx.rank), ctx.group)


def loss_of_a_wrong_kind_on_one_rank(ctx, fault):
    wrong = fault if ctx.rank == 1 else {}
    token_mean_loss(wrong.get("loss_sum", torch.zeros(())), wrong.get("n_valid", torch.tensor(1)), ctx.group)


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ({"loss_sum": torch.zeros(3)}, r"0-d sum, got shape \[3\]"),
        ({"n_valid": torch.tensor(1.5)}, "one integer, got torch.float32"),
        ({"n_valid": torch.tensor(1j)}, "one integer, got torch.complex64"),
        ({"n_valid": None}, "one integer, got None"),
        ({"n_valid": 2.0}, "one integer, got 2.0"),
    ],
    ids=str,
)
def test_a_loss_of_a_wrong_kind_on_one_rank_raises_everywhere(ranks, fault, text):
    ranks(2).run_raises(loss_of_a_wrong_kind_on_one_rank, fault, match=f"rank 1: .*{text}")


def evaluate(ctx):
    return token_mean_loss(torch.tensor(4.0), torch.tensor(1 + ctx.rank), ctx.group)


def test_a_loss_without_graph_on_one_rank_raises_everywhere(ranks):
    ranks(2).run_raises(loss_detached_on_one_rank, match="1 of 2 ranks")
    assert [loss.item() for loss in ranks(2).run(evaluate)] == pytest.approx([4 / 3, 4 / 3])


def test_arguments_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="0-d sum"):
        token_mean_loss(torch.zeros(3), 3)
    with pytest.raises(ValueError, match="one integer"):
        token_mean_loss(torch.zeros(()), torch.tensor(1.5))
    with pytest.raises(ValueError, match="no parameter requires grad"):
        reduce_gradients([nn.Parameter(torch.zeros(2), requires_grad=False)])
    with pytest.raises(ValueError, match="token_mask"):
        load_balancing_loss(torch.zeros(4, 3), torch.zeros(5, 2, dtype=torch.long))


def router_case() -> tuple[Tensor, Tensor, Tensor]:
    """Router weights `[5, 6]`, token states `[24, 6]` and which of them are real."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(5, 6, generator=generator, dtype=torch.float64)
    states = torch.randn(24, 6, generator=generator, dtype=torch.float64)
    return weight, states, torch.arange(24) % 7 != 3


def balance_step(ctx):
    weight, states, mask = router_case()
    weight = nn.Parameter(weight)
    layout = SequenceLayout.zigzag(24, ctx.size)
    states, mask = layout.shard(states, ctx.rank, dim=0), layout.shard(mask, ctx.rank, dim=0)
    states = states.masked_fill(~mask[:, None], 1e4)  # what pads hold does not matter
    probs = (states @ weight.T).softmax(-1)
    loss = load_balancing_loss(probs, probs.topk(2).indices, ctx.group, mask)
    loss.backward()
    reduce_gradients([weight], ctx.group)
    return loss.detach(), weight.grad


def test_load_balancing_loss_does_not_depend_on_the_number_of_ranks(ranks):
    weight, states, mask = router_case()
    weight.requires_grad_()
    probs = (states[mask] @ weight.T).softmax(-1)
    chosen = nn.functional.one_hot(probs.topk(2).indices, 5).double()  # [T, K, E]
    expected = 5 * (chosen.mean((0, 1)) * probs.mean(0)).sum()
    expected.backward()
    for size in (1, 2, 4):
        results = ranks(size).run(balance_step)
        assert_close(sum(loss for loss, _ in results), expected.detach(), rel=1e-13)
        for _, grad in results:
            assert_close(grad, weight.grad, rel=1e-12)


def test_balanced_routing_has_load_balancing_loss_one():
    loss = load_balancing_loss(torch.full((6, 3), 1 / 3), torch.arange(6)[:, None] % 3)
    assert loss.item() == pytest.approx(1.0)
