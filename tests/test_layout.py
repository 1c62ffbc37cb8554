"""Layouts: where each token goes, what it may see, and that nothing is lost or seen twice."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laga_attn.layout import SequenceLayout, Span
from laga_attn.routing import route_tokens
from tests.oracle import visibility

KINDS = ("zigzag", "contiguous")
lengths_of_documents = st.lists(st.integers(0, 23), min_size=1, max_size=5).filter(any)
layouts = st.builds(
    lambda lengths, size, kind: SequenceLayout.packed(_offsets(lengths), size, kind=kind),
    lengths_of_documents,
    st.integers(1, 6),
    st.sampled_from(KINDS),
)
masks = st.one_of(
    st.tuples(st.just(True), st.none()),
    st.tuples(st.just(False), st.none()),
    st.tuples(st.just(True), st.integers(1, 9)),
)


def _offsets(lengths):
    return [sum(lengths[:n]) for n in range(len(lengths) + 1)]


def _pairs(span: Span) -> torch.Tensor:
    """`[q_len, k_len]` bool, from the definition of a span."""
    distance = torch.arange(span.q_len)[:, None] + span.k_len - span.q_len - torch.arange(span.k_len)[None, :]
    seen = torch.ones(span.q_len, span.k_len, dtype=torch.bool)
    if span.causal:
        seen &= distance >= 0
    if span.window is not None:
        seen &= distance < span.window
    return seen


@settings(deadline=None, max_examples=150)
@given(layouts, masks, st.data())
def test_every_visible_pair_is_in_exactly_one_span_of_exactly_one_group(layout, mask, data):
    causal, window = mask
    degree = data.draw(st.sampled_from([u for u in range(1, layout.cp_size + 1) if layout.cp_size % u == 0]))
    held = layout.rows_by_rank()
    counted = torch.zeros(layout.seq_len, layout.seq_len, dtype=torch.int64)
    for rank in range(layout.cp_size):
        routing = route_tokens(layout, rank, degree, causal, window)
        members = range(rank // degree * degree, rank // degree * degree + degree)
        queries = torch.cat([torch.from_numpy(held[p][held[p] >= 0]) for p in members]).sort().values
        visible = visibility(layout.lengths, causal, window)[queries].any(0)
        keys = visible.nonzero()[:, 0]
        assert (routing.num_queries, routing.keys.num_keys) == (len(queries), len(keys))
        if rank % degree == 0:  # one member speaks for the group: the others attend the same pairs with other heads
            for span in routing.keys.spans:
                rows = queries[span.q_start : span.q_start + span.q_len]
                columns = keys[span.k_start : span.k_start + span.k_len]
                pairs = _pairs(span)
                assert span.area() == int(pairs.sum())
                counted[rows[:, None], columns[None, :]] += pairs.long()
    assert torch.equal(counted, visibility(layout.lengths, causal, window).long())


@settings(deadline=None, max_examples=100)
@given(layouts, st.booleans())
def test_own_keys_and_the_others_together_are_all_pairs_once(layout, causal):
    held = [rows[rows >= 0] for rows in layout.rows_by_rank()]
    counted = torch.zeros(layout.seq_len, layout.seq_len, dtype=torch.int64)
    for rank in range(layout.cp_size):
        own, others = route_tokens(layout, rank, 1, causal, None, own_keys_apart=True).segments
        seen = visibility(layout.lengths, causal, None)[held[rank]].any(0).numpy()
        others_keys = [t for p, tokens in enumerate(held) if p != rank for t in tokens.tolist() if seen[t]]
        for segment, keys in ((own, held[rank].tolist()), (others, sorted(others_keys))):
            assert segment.num_keys == len(keys)
            for span in segment.spans:
                rows = torch.from_numpy(held[rank])[span.q_start : span.q_start + span.q_len]
                columns = torch.tensor(keys)[span.k_start : span.k_start + span.k_len]
                counted[rows[:, None], columns[None, :]] += _pairs(span).long()
    assert torch.equal(counted, visibility(layout.lengths, causal, None).long())


@settings(deadline=None, max_examples=80)
@given(layouts, masks, st.data())
def test_what_each_rank_sends_is_what_the_other_expects_in_the_order_it_needs(layout, mask, data):
    degree = data.draw(st.sampled_from([u for u in range(1, layout.cp_size + 1) if layout.cp_size % u == 0]))
    routes = [route_tokens(layout, rank, degree, *mask) for rank in range(layout.cp_size)]
    held = [rows[rows >= 0] for rows in layout.rows_by_rank()]
    for picked in (lambda r: r.queries, lambda r: r.keys.routes[0]):
        for rank, routing in enumerate(routes):
            route = picked(routing)
            arriving = [held[p][picked(routes[p]).send[rank]] for p in range(layout.cp_size)]
            assert tuple(len(part) for part in arriving) == route.received
            assert tuple(len(held[rank][rows]) for rows in route.send) == route.sent
            arrived = torch.cat([torch.from_numpy(part) for part in arriving])
            final = arrived if route.order is None else arrived[torch.from_numpy(route.order)]
            assert torch.equal(final, arrived.sort().values)
            if route.inverse is not None:
                assert torch.equal(final[torch.from_numpy(route.inverse)], arrived)


@settings(deadline=None, max_examples=80)
@given(layouts, st.integers(0, 3), st.integers(0, 3))
def test_shard_and_unshard_round_trip_along_any_dim(layout, before, after):
    shape = (2,) * before + (layout.seq_len,) + (3,) * after
    whole = torch.arange(1, 1 + torch.Size(shape).numel()).view(shape)
    parts = [layout.shard(whole, rank, dim=before, pad_value=-7) for rank in range(layout.cp_size)]
    assert torch.equal(layout.unshard(parts, dim=before), whole)
    assert all(part.shape[before] == layout.local_len for part in parts)
    pads = sum(int((part == -7).sum()) for part in parts)
    assert pads == whole.numel() // layout.seq_len * (layout.padded_len - layout.seq_len)


@settings(deadline=None, max_examples=80)
@given(layouts)
def test_every_document_pads_to_a_multiple_and_pads_stay_at_its_end(layout):
    unit = {"zigzag": 2 * layout.cp_size, "contiguous": layout.cp_size}[layout.kind] if layout.cp_size > 1 else 1
    assert layout.multiple == unit
    for length, padded in zip(layout.lengths, layout.padded_lengths, strict=True):
        assert padded % unit == 0
        assert 0 <= padded - length < unit
    padded_stream = torch.full((layout.padded_len,), -1)
    for rank, rows in enumerate(layout.rows_by_rank()):
        padded_stream[torch.from_numpy(layout.padded_rows(rank))] = torch.from_numpy(rows)
    assert torch.equal(padded_stream[padded_stream >= 0], torch.arange(layout.seq_len))


@settings(deadline=None, max_examples=80)
@given(layouts)
def test_positions_count_inside_each_document(layout):
    inside = torch.cat([torch.arange(n) for n in layout.lengths])
    parts = [layout.positions(rank) for rank in range(layout.cp_size)]
    assert torch.equal(layout.unshard(parts, dim=0), inside)
    for rank, rows in enumerate(layout.rows_by_rank()):
        assert (parts[rank][torch.from_numpy(rows < 0)] == 0).all()


@settings(deadline=None, max_examples=80)
@given(layouts, st.integers(1, 3))
def test_labels_are_the_next_token_of_the_same_document(layout, batch):
    tokens = torch.arange(batch * layout.seq_len).view(batch, -1) + 5
    shards = [layout.shard_lm(tokens, rank, pad_token=3) for rank in range(layout.cp_size)]
    labels = layout.unshard([shard.labels for shard in shards])
    offsets = layout.cu_seqlens
    for start, stop in itertools.pairwise(offsets):
        if stop > start:
            assert torch.equal(labels[:, start : stop - 1], tokens[:, start + 1 : stop])
            assert (labels[:, stop - 1] == -100).all()
    assert torch.equal(layout.unshard([shard.input_ids for shard in shards]), tokens)
    for rank, shard in enumerate(shards):
        assert torch.equal(shard.loss_mask, shard.labels != -100)
        assert torch.equal(shard.position_ids, layout.positions(rank).expand(batch, -1))
        pads = torch.from_numpy(layout.rows(rank) < 0)
        assert (shard.input_ids[:, pads] == 3).all()
        assert not shard.loss_mask[:, pads].any()
    assert sum(int(s.loss_mask.sum()) for s in shards) == batch * sum(max(n - 1, 0) for n in layout.lengths)


def test_zigzag_is_chunk_r_and_its_mirror():
    layout = SequenceLayout.zigzag(16, 4)
    assert [layout.rows(rank).tolist() for rank in range(4)] == [
        [0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9],
    ]  # fmt: skip
    gathered = torch.cat([layout.shard(torch.arange(16), rank, dim=0) for rank in range(4)]).view(8, 2)
    order = [2 * c if c < 4 else 16 - 1 - 2 * c for c in range(8)]  # 4P - 1 - 2c for the second half
    assert gathered[order].flatten().tolist() == list(range(16))


def test_documents_are_split_one_by_one_and_start_at_position_0():
    layout = SequenceLayout.packed([0, 5, 14], 2)  # 5 pads to 8, 9 to 12
    assert layout.padded_lengths == (8, 12)
    assert layout.rows(0).tolist() == [0, 1, -1, -1, 5, 6, 7, -1, -1, -1]
    assert layout.rows(1).tolist() == [2, 3, 4, -1, 8, 9, 10, 11, 12, 13]
    assert layout.positions(1).tolist() == [2, 3, 4, 0, 3, 4, 5, 6, 7, 8]


def test_a_stream_padded_by_the_caller_shards_alike():
    own = SequenceLayout.packed([0, 5, 14], 2)
    given_pads = SequenceLayout.packed([0, 5, 14], 2, cu_seqlens_padded=[0, 8, 20])
    assert own == given_pads
    assert hash(own) == hash(given_pads)
    padded = torch.tensor([*range(5), 90, 90, 90, *range(5, 14), 90, 90, 90])
    for rank in range(2):
        expected = own.shard(torch.arange(14), rank, dim=0, pad_value=90)
        assert torch.equal(given_pads.shard(padded, rank, dim=0), expected)
    wider = SequenceLayout.packed([0, 5, 14], 2, cu_seqlens_padded=torch.tensor([0, 8, 24]))
    assert (wider.local_len, wider.seq_len) == (12, 14)


def test_sharding_is_differentiable():
    layout = SequenceLayout.zigzag(7, 2)
    x = torch.randn(1, 7, 2, dtype=torch.float64, requires_grad=True)
    whole = layout.unshard([layout.shard(x, rank) for rank in range(2)])
    (grad,) = torch.autograd.grad((whole * x.detach()).sum(), x)
    assert torch.equal(grad, x)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_labels_of_narrow_tokens_lose_nothing(dtype):
    tokens = torch.tensor([[1, 156, 3, 4]], dtype=dtype)
    shard = SequenceLayout.zigzag(4, 1).shard_lm(tokens, 0)
    assert shard.labels.tolist() == [[156, 3, 4, -100]]
    assert shard.loss_mask.tolist() == [[True, True, True, False]]
    assert shard.labels.dtype == shard.input_ids.dtype == torch.int64


def test_two_rows_of_a_batch_equal_one_merged_pack():
    rows = [SequenceLayout.packed([0, 3, 9], 2), SequenceLayout.packed([0, 4, 9], 2)]
    merged = SequenceLayout.packed([0, 3, 9, 13, 18], 2)
    assert merged.lengths == rows[0].lengths + rows[1].lengths
    assert merged.local_len == sum(row.local_len for row in rows)


BAD = [
    (lambda: SequenceLayout.zigzag(0, 2), "seq_len must be at least 1, got 0"),
    (lambda: SequenceLayout.zigzag(8, 0), "cp_size must be at least 1, got 0"),
    (lambda: SequenceLayout.packed([1, 4], 2), "cu_seqlens must start at 0"),
    (lambda: SequenceLayout.packed([0, 5, 4], 2), "never decrease"),
    (lambda: SequenceLayout.packed([0], 2), "n \\+ 1 offsets"),
    (lambda: SequenceLayout.packed(torch.tensor([0.0, 4.0]), 2), "1-D integer tensor"),
    (lambda: SequenceLayout.packed([0, 4], 2, kind="striped"), "unknown layout kind 'striped'; choose one of"),
    (lambda: SequenceLayout.packed([0, 5], 2, cu_seqlens_padded=[0, 6]), "padded length 6.*multiple of 4.*pad it to 8"),
    (lambda: SequenceLayout.packed([0, 5], 2, cu_seqlens_padded=[0, 4]), "0 <= length <= padded length"),
    (lambda: SequenceLayout.packed([0, 5], 2, cu_seqlens_padded=[0, 4, 8]), "1 lengths and 2 padded"),
    (lambda: SequenceLayout.zigzag(10, 2).shard(torch.ones(1, 9), 0), "9 tokens.*holds 10 \\(12 with pads\\)"),
    (lambda: SequenceLayout.zigzag(8, 2).shard(torch.ones(1, 8), 2), "rank 2 is outside this layout's 2 ranks"),
    (lambda: SequenceLayout.zigzag(8, 2).unshard([torch.ones(1, 4)]), "all 2 ranks in rank order, got 1"),
    (lambda: SequenceLayout.zigzag(8, 2).unshard([torch.ones(1, 4), torch.ones(1, 3)]), "rank 1 has 3 rows"),
    (lambda: SequenceLayout.zigzag(8, 2).shard_lm(torch.ones(1, 7), 0), r"shape \[B, 8\], got \[1, 7\]"),
]  # fmt: skip


@pytest.mark.parametrize(("build", "message"), BAD)
def test_what_does_not_fit_is_refused_with_numbers(build, message):
    with pytest.raises(ValueError, match=message):
        build()
