"""`scheme="auto"` against exhaustive sweeps that share no code with it: traces, and a count of one's own per rank."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np
import pytest

import laga_attn as laga
from laga_attn.attention_plan import LatentDims
from laga_attn.auto import CPU_FLOPS_PER_PORT_BYTE, FLOPS_PER_PORT_BYTE, choose, flops_per_port_byte
from tests.plan.tracing import Call, trace_call

MODELS = {
    "deepseek-v3": LatentDims(128, 128, 64, 128, 512),
    "kimi": LatentDims(64, 128, 64, 128, 512),
    "minicpm3": LatentDims(40, 64, 32, 64, 256),
    "glm-flash": LatentDims(20, 192, 64, 256, 512),
    "deepseek-v2-lite": LatentDims(16, 128, 64, 128, 512),
    "small": LatentDims(4, 32, 16, 32, 64),
}
# FLOPs that a device does while a byte passes its port: from slow cores that share memory to a GPU behind 10 Gbit/s.
LINKS = (300.0, CPU_FLOPS_PER_PORT_BYTE, FLOPS_PER_PORT_BYTE, 1e4, 4e4, 4e5)
WITHIN = 1.03


def degrees(size: int, heads: int) -> list[int]:
    return [u for u in range(1, size + 1) if size % u == 0 and heads % u == 0]


@dataclass(frozen=True)
class Sweep:
    """Bytes and FLOPs of every rank (arrays) of every candidate."""

    found: dict[tuple[str, int], tuple[np.ndarray, np.ndarray]]

    def cost(self, candidate: tuple[str, int], flops_per_byte: float) -> float:
        """Of the slowest rank, which the others wait for."""
        moved, flops = self.found[candidate]
        return float((moved + flops / flops_per_byte).max())

    def best(self, flops_per_byte: float) -> tuple[str, int]:
        return min(self.found, key=lambda candidate: self.cost(candidate, flops_per_byte))


def counted(dims: LatentDims, tokens: int, size: int) -> Sweep:
    """Causal zigzag in bf16, every scheme with what it saves by default, chunk by chunk of every rank."""
    rank, chunk = np.arange(size), tokens // (2 * size)
    qk, v = dims.qk_nope_head_dim + dims.qk_rope_head_dim, dims.v_head_dim
    latent, up = dims.kv_lora_rank + dims.qk_rope_head_dim, dims.qk_nope_head_dim + v
    found = {}
    for degree in degrees(size, dims.num_heads):
        heads, group = dims.num_heads // degree, rank // degree
        seen = (2 * size - group * degree) * chunk  # up to the end of the group's last chunk
        received, sent = seen - 2 * chunk, (size - 1 + (group + 1) * degree - 1) * chunk
        # A chunk and its mirror image see 2P chunks between them, half of the two diagonal ones hidden.
        pairs = degree * (chunk * chunk * (2 * size - 1) + chunk * (chunk + 1))
        exchanged = 2 * chunk * dims.num_heads * (degree - 1) // degree
        for scheme in ("explicit", "absorbed", "laga"):
            row = heads * (qk + v) if scheme == "explicit" else latent
            again = 0 if scheme == "explicit" else row  # the latent is gathered once more in backward
            forward = exchanged * 2 * (qk + v) + 2 * row * np.maximum(received, sent)
            # What went out comes home as gradients; with the output's gradient travels one fp32 number.
            home, back = sent * row + received * again, received * row + sent * again
            backward = exchanged * (2 * (qk + v) + 4) + 2 * np.maximum(home, back)
            d_qk, d_v = (latent, dims.kv_lora_rank) if scheme == "absorbed" else (qk, v)
            attention = 2 * pairs * heads * (4 * d_qk + 3 * d_v)
            rebuilt = {  # multiplications with kv_b_proj in forward, again in backward, and of its two gradients
                "explicit": 2 * chunk * dims.num_heads * up * 3 * np.ones(size),
                "laga": seen * heads * up * 4,
                "absorbed": 2 * chunk * degree * heads * (up + 3 * dims.qk_nope_head_dim + 2 * v) * np.ones(size),
            }[scheme]
            found[scheme, degree] = (forward + backward, attention + 2 * rebuilt * dims.kv_lora_rank)
    return Sweep(found)


def traced(dims: LatentDims, tokens: int, size: int) -> Sweep:
    """The same from the code that trains."""
    layout = laga.SequenceLayout.zigzag(tokens, size)
    found = {}
    for degree in degrees(size, dims.num_heads):
        for scheme in ("explicit", "absorbed", "laga"):
            moved, flops = [], []
            for rank in (0, size - 1):
                trace = trace_call(Call(layout, scheme, degree, rank, dims))
                moved.append(
                    sum(
                        max(
                            sum(t.sent_bytes() for t in trace.transfers if t.phase == phase),
                            sum(t.received_bytes() for t in trace.transfers if t.phase == phase),
                        )
                        for phase in ("forward", "backward")
                    )
                )
                flops.append(trace.flops.total())
            found[scheme, degree] = (np.array(moved), np.array(flops))
    return Sweep(found)


def chosen(dims: LatentDims, tokens: int, size: int, flops_per_byte: float) -> tuple[str, int]:
    layout = laga.SequenceLayout.zigzag(tokens, size)
    return choose(dims, layout, causal=True, itemsize=2, flops_per_port_byte=flops_per_byte)


@pytest.mark.parametrize(
    ("model", "tokens", "size"),
    [("deepseek-v3", 2**12, 2), ("deepseek-v2-lite", 2**14, 4), ("small", 2**11, 8), ("small", 2**11, 6)],
)
def test_the_choice_is_within_three_percent_of_the_best_of_all_traces(model, tokens, size):
    dims = MODELS[model]
    tokens = tokens // (2 * size) * 2 * size
    sweep = traced(dims, tokens, size)
    for link in LINKS:
        choice = chosen(dims, tokens, size, link)
        best = sweep.best(link)
        assert sweep.cost(choice, link) <= WITHIN * sweep.cost(best, link), f"{link:g}: {choice}, not {best}"
    counts = counted(dims, tokens, size)
    for candidate, (moved, flops) in sweep.found.items():  # so the count below may stand for traces
        assert [moved[0], moved[-1]] == [counts.found[candidate][0][0], counts.found[candidate][0][-1]], candidate
        assert [flops[0], flops[-1]] == [counts.found[candidate][1][0], counts.found[candidate][1][-1]], candidate


@pytest.mark.parametrize("model", MODELS)
def test_the_choice_is_within_three_percent_of_the_best_at_any_size_and_link(model):
    dims, worse, seen = MODELS[model], [], set()
    for size in (2, 4, 6, 8, 16, 24, 32, 64, 128, 256, 512):
        for kilo in (2, 8, 32, 128, 512, 4096):
            tokens = max(1, kilo * 1024 // (2 * size)) * 2 * size
            sweep = counted(dims, tokens, size)
            for link in LINKS:
                choice, best = chosen(dims, tokens, size, link), sweep.best(link)
                seen.add(choice[0])
                ratio = sweep.cost(choice, link) / sweep.cost(best, link)
                if ratio > WITHIN:
                    worse.append(f"P={size} S={tokens} F={link:g}: {choice} costs {ratio:.3f} of {best}")
    assert not worse, "\n".join([f"{len(worse)} cells", *worse[:20]])
    assert seen >= {"laga", "explicit"}


@pytest.mark.parametrize("size", [16, 64, 256])
def test_explicit_wins_at_many_ranks_with_few_heads_and_laga_at_few_ranks_with_many(size):
    few, many = MODELS["deepseek-v2-lite"], MODELS["deepseek-v3"]
    tokens = 4096 * size
    scheme, degree = chosen(few, tokens, size, FLOPS_PER_PORT_BYTE)
    assert (scheme, degree) == ("explicit", 16)
    sweep = counted(few, tokens, size)
    laga_best = min(sweep.cost(c, FLOPS_PER_PORT_BYTE) for c in sweep.found if c[0] == "laga")
    assert laga_best > sweep.cost((scheme, degree), FLOPS_PER_PORT_BYTE)
    assert chosen(many, 8 * 4096, 8, FLOPS_PER_PORT_BYTE)[0] == "laga"


def test_a_slower_link_never_makes_the_choice_move_more_bytes():
    for dims in MODELS.values():
        sweep = counted(dims, 2**17, 32)
        moved = [sweep.found[chosen(dims, 2**17, 32, link)][0].max() for link in LINKS]
        assert moved == sorted(moved, reverse=True)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_without_a_hint_the_choice_does_not_depend_on_the_width_of_elements(device):
    """Wider elements take longer both to send and to compute with."""
    for dims in MODELS.values():
        for size in (2, 4, 8, 64):
            for tokens in (2**10, 2**14, 2**18):
                layout = laga.SequenceLayout.zigzag(tokens, size)
                choices = {
                    choose(
                        dims, layout, causal=True, itemsize=itemsize,
                        flops_per_port_byte=flops_per_port_byte(None, device, itemsize),
                    )
                    for itemsize in (2, 4, 8)
                }  # fmt: skip
                assert len(choices) == 1, (dims, size, tokens, choices)
    assert flops_per_port_byte(None, device, 2) != flops_per_port_byte(None, "cpu" if device == "cuda" else "cuda", 2)
    assert {flops_per_port_byte(1234.0, device, itemsize) for itemsize in (2, 4, 8)} == {1234.0}


def test_a_choice_takes_milliseconds_and_less_the_second_time():
    def seconds() -> float:
        started = time.process_time()
        chosen(MODELS["deepseek-v3"], 2**21, 1024, 1234.5)
        return time.process_time() - started

    assert seconds() < 0.5  # some 60 ms on a quiet machine, with 24 candidates of 1024 ranks
    assert seconds() < 1e-3


def test_a_given_degree_is_kept_and_one_rank_moves_nothing():
    layout = laga.SequenceLayout.zigzag(2**14, 8)
    for degree in (1, 2, 4, 8):
        choice = choose(MODELS["kimi"], layout, causal=True, itemsize=2, ulysses_degree=degree)
        assert choice[1] == degree
    alone = replace(MODELS["kimi"], num_heads=7)
    assert choose(alone, laga.SequenceLayout.zigzag(2**14, 1), causal=True, itemsize=2) == ("laga", 1)
