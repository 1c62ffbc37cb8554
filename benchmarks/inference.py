"""Prefill and decode against the other ways of doing them, on this machine's CPU.

Every command measures its candidates in turns, one of each in every round: ratios are medians of the ratios inside
rounds, which is what a busy machine leaves undisturbed. Head sizes are DeepSeek-V3's, with fewer heads.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F
from typer import Option

import laga_attn as laga
from laga_attn.attention_plan import LatentDims
from laga_attn.bench.ranks import run_on_ranks
from laga_attn.inference import LatentCache, attend
from laga_attn.inference.attention import REBUILD_COST, crossover

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False)

Heads = Annotated[int, Option(help="Attention heads.")]
Rounds = Annotated[int, Option(help="Rounds after one of warm-up.")]
Dtype = Annotated[str, Option(help="bfloat16 or float32.")]
Lengths = Annotated[list[int], Option(help="Repeat the option for several.")]

_ABSORB, _REBUILD = 2**40, 1  # values of rebuild_from
_QUERIES = [16, 32, 64, 96, 128, 192, 256, 384]


@dataclass(frozen=True, slots=True)
class Layer:
    """One attention layer: its sizes, its weight, and random new tokens."""

    dims: LatentDims
    dtype: torch.dtype

    @staticmethod
    def of(heads: int, dtype: str) -> Layer:
        return Layer(LatentDims(heads, 128, 64, 128, 512), getattr(torch, dtype))

    def weight(self) -> Tensor:
        shape = self.dims.num_heads * self.dims.up_head_dim, self.dims.kv_lora_rank
        return (torch.randn(*shape) / self.dims.kv_lora_rank**0.5).to(self.dtype)

    def tokens(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """`q`, `c_kv` and `k_rope` of some tokens."""
        shapes = (self.dims.num_heads, self.dims.qk_head_dim), (self.dims.kv_lora_rank,), (self.dims.qk_rope_head_dim,)
        q, c_kv, k_rope = (torch.randn(1, count, *shape).to(self.dtype) for shape in shapes)
        return q, c_kv, k_rope

    def cache(self, context: int, cp: laga.ContextParallel | None = None) -> tuple[LatentCache, int]:
        """A cache with one sequence of so many random tokens."""
        cache = LatentCache(1, self.dims.kv_lora_rank, self.dims.qk_rope_head_dim, cp=cp, dtype=self.dtype)
        sequence = cache.add()
        for start in range(0, context, 4096):
            cache.append(sequence, torch.randn(1, min(4096, context - start), self.dims.latent_dim).to(self.dtype))
        return cache, sequence

    def attending(
        self, cache: LatentCache, sequence: int, new: int, rebuild_from: int, weight: Tensor
    ) -> Callable[[], Tensor]:
        """A call that attends with new tokens and forgets them again."""
        step = cache.plan({sequence: new}, rebuild_from=rebuild_from)
        tokens = self.tokens(step.local_len)
        dims = self.dims
        return lambda: attend(
            *tokens, weight, cache=cache, step=step, layer=0, qk_nope_head_dim=dims.qk_nope_head_dim,
            v_head_dim=dims.v_head_dim,
        )  # fmt: skip


def in_turns(
    candidates: dict[str, Callable[[], object]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Seconds of each candidate in each round, after one round of warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(rounds + 1):
        for name, call in candidates.items():
            if dist.is_initialized():
                dist.barrier()
            start = clock()
            call()
            if turn:
                seconds[name].append(clock() - start)
    return seconds


def ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """Median of the ratios inside rounds."""
    return median(a / b for a, b in zip(over, under, strict=True))


# Prefill: LAGA, through the cache, against the other schemes without one.


@app.command()
def prefill(
    lengths: Lengths = [512, 1024, 2048, 4096],  # noqa: B006
    ranks: Annotated[int, Option(help="Processes that share the prompt.")] = 2,
    heads: Heads = 16,
    dtype: Dtype = "bfloat16",
    rounds: Rounds = 5,
) -> None:
    """Time of a whole prompt in one layer: LAGA that fills the cache, absorbed and explicit attention that do not."""
    table = Table(title=f"prefill, {ranks} ranks, {heads} heads, {dtype}", title_justify="left")
    for column in ("prompt", "laga U=1, ms", "laga U=P, x", "absorbed, x", "explicit, x"):
        table.add_column(column, justify="right")
    per_rank = run_on_ranks(_prefill_rank, ranks, lengths, heads, dtype, rounds)
    for number, length in enumerate(lengths):
        cell = {name: _slowest([result[number][name] for result in per_rank]) for name in per_rank[0][number]}
        base = cell["laga U=1"]
        times = [f"{ratio(cell[name], base):.2f}" for name in ("laga U=P", "absorbed", "explicit")]
        table.add_row(str(length), f"{median(base) * 1e3:.0f}", *times)
    Console().print(table, "x: times the time of laga U=1")


def _slowest(by_rank: list[list[float]]) -> list[float]:
    return [max(seconds) for seconds in zip(*by_rank, strict=True)]


def _prefill_rank(lengths: list[int], heads: int, dtype: str, rounds: int) -> list[dict[str, list[float]]]:
    layer = Layer.of(heads, dtype)
    size = dist.get_world_size()
    weight = layer.weight()
    results = []
    for length in lengths:
        layout = laga.SequenceLayout.zigzag(length, size)
        tokens = layer.tokens(layout.local_len)
        candidates: dict[str, Callable[[], object]] = {}
        for name, degree in (("laga U=1", 1), ("laga U=P", size)):
            cp = laga.ContextParallel(_world(), degree)
            candidates[name] = layer.attending(*layer.cache(0, cp), length, _REBUILD, weight)
        for scheme in ("absorbed", "explicit"):
            candidates[scheme] = _without_cache(layer, tokens, weight, layout, scheme)
        results.append(in_turns(candidates, rounds))
    return results


def _without_cache(
    layer: Layer, tokens: tuple[Tensor, ...], weight: Tensor, layout: laga.SequenceLayout, scheme: str
) -> Callable[[], Tensor]:
    cp = laga.ContextParallel(_world(), dist.get_world_size())
    q, c_kv, k_rope = tokens

    def call() -> Tensor:
        with torch.no_grad():
            return laga.latent_attention(
                q, c_kv, k_rope, weight, layout=layout, cp=cp, scheme=scheme,
                qk_nope_head_dim=layer.dims.qk_nope_head_dim, v_head_dim=layer.dims.v_head_dim,
            )  # fmt: skip

    return call


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


# Decode: absorbed on the cache, rebuilt every step, Transformers' own cache, and a cache of full K and V.


@app.command()
def decode(
    lengths: Lengths = [1024, 4096, 16384],  # noqa: B006
    heads: Heads = 16,
    dtype: Dtype = "bfloat16",
    rounds: Rounds = 7,
    threads: Annotated[int, Option(help="Threads of PyTorch.")] = 1,
) -> None:
    """Time of one token over a context, and what its cache takes.

    Transformers 5.24 stores latents too and rebuilds K and V from all of them at every step ("Transformers"); versions
    before stored K and V of every head ("full K/V": here without the copy that growing their tensors costs).
    """
    torch.set_num_threads(threads)
    layer = Layer.of(heads, dtype)
    table = Table(title=f"decode, one process, {heads} heads, {dtype}", title_justify="left")
    for column in (
        "context",
        "absorbed, ms",
        "rebuilt, x",
        "Transformers, x",
        "full K/V, x",
        "bytes per token and layer",
    ):
        table.add_column(column, justify="right")
    weight = layer.weight()
    for length in lengths:
        cache, sequence = layer.cache(length)
        stock, stock_bytes = _transformers_cache(layer, length)
        full, full_bytes = _full_cache(layer, length)
        seconds = in_turns(
            {
                "absorbed": layer.attending(cache, sequence, 1, _ABSORB, weight),
                "rebuilt": layer.attending(cache, sequence, 1, _REBUILD, weight),
                "Transformers": stock,
                "full": full,
            },
            rounds,
        )
        own = seconds["absorbed"]
        ratios = [f"{ratio(seconds[name], own):.1f}" for name in ("rebuilt", "Transformers", "full")]
        held = cache.memory().total / length
        sizes = f"{held:.0f}, Transformers {stock_bytes / length:.0f}, full {full_bytes / length:.0f}"
        table.add_row(str(length), f"{median(own) * 1e3:.2f}", *ratios, sizes)
    Console().print(table, "x: times the time of absorbed attention")


def _transformers_cache(layer: Layer, length: int) -> tuple[Callable[[], object], int]:
    """Decode of one token as the attention module of Transformers does it from its own cache, projections left out."""
    from transformers.cache_utils import DynamicCache
    from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

    warnings.simplefilter("ignore")
    dims = layer.dims
    config = DeepseekV3Config(hidden_size=64, num_attention_heads=dims.num_heads, num_key_value_heads=dims.num_heads)
    module: Any = DeepseekV3Attention(config, 0).to(layer.dtype)
    cache: Any = DynamicCache(config=config)
    _, c_kv, k_rope = layer.tokens(length)
    cache.update(c_kv[:, None], k_rope[:, None], 0)
    q, new_c_kv, new_k_rope = layer.tokens(1)

    def call() -> object:
        with torch.no_grad():
            kv_nope, k_rot = cache.update(new_c_kv[:, None], new_k_rope[:, None], 0)
            key, value = module.expand_kv(kv_nope, k_rot)
            out = F.scaled_dot_product_attention(q.transpose(1, 2), key, value)
            cache.crop(-1)
        return out

    return call, sum(t.nbytes for t in (cache.layers[0].keys, cache.layers[0].values))


def _full_cache(layer: Layer, length: int) -> tuple[Callable[[], object], int]:
    """Decode of one token over stored K and V of every head."""
    dims = layer.dims
    key = torch.randn(1, dims.num_heads, length + 1, dims.qk_head_dim).to(layer.dtype)
    value = torch.randn(1, dims.num_heads, length + 1, dims.v_head_dim).to(layer.dtype)
    q = layer.tokens(1)[0].transpose(1, 2)
    nbytes = (key.nbytes + value.nbytes) * length // (length + 1)
    return lambda: F.scaled_dot_product_attention(q, key, value), nbytes


# Decode over ranks.


@app.command()
def ranks(
    lengths: Lengths = [8192, 32768, 131072],  # noqa: B006
    sizes: Annotated[list[int], Option(help="Numbers of ranks; repeat the option for several.")] = [1, 2, 4],  # noqa: B006
    heads: Heads = 16,
    dtype: Dtype = "bfloat16",
    rounds: Rounds = 7,
) -> None:
    """CPU time of one token on the busiest rank, one thread a rank, over contexts and numbers of ranks.

    CPU time, which ranks that share a core do not take from each other; messages are counted in bytes.
    """
    table = Table(title=f"decode on ranks, {heads} heads, {dtype}", title_justify="left")
    columns = ("context", *(f"P={size}: CPU ms, cache MiB" for size in sizes), "bytes sent per token")
    for column in columns:
        table.add_column(column, justify="right")
    results = {size: run_on_ranks(_decode_rank, size, lengths, heads, dtype, rounds) for size in sizes}
    for number, length in enumerate(lengths):
        cells, sent = [], []
        for size in sizes:
            by_rank = [rank[number] for rank in results[size]]
            busiest = max(median(seconds) for seconds, _, _ in by_rank)
            cells.append(f"{busiest * 1e3:.2f}, {max(held for _, held, _ in by_rank) / 2**20:.1f}")
            sent.append(str(max(count for _, _, count in by_rank)))
        table.add_row(str(length), *cells, ", ".join(sent))
    Console().print(table)


def _decode_rank(lengths: list[int], heads: int, dtype: str, rounds: int) -> list[tuple[list[float], int, int]]:
    layer = Layer.of(heads, dtype)
    cp = laga.ContextParallel.none() if dist.get_world_size() == 1 else laga.ContextParallel(_world())
    weight = layer.weight()
    results = []
    for length in lengths:
        cache, sequence = layer.cache(length, cp)
        call = layer.attending(cache, sequence, 1, _ABSORB, weight)
        with laga.traffic() as ledger:
            call()
        seconds = in_turns({"decode": call}, rounds, time.process_time)["decode"]
        results.append((seconds, cache.memory().used[cp.rank], ledger.sent()))
    return results


# Crossover.


@app.command(name="crossover")
def measure_crossover(
    context: Annotated[int, Option(help="Tokens in the cache.")] = 4096,
    new: Annotated[list[int], Option(help="Query tokens; repeat the option for several.")] = _QUERIES,
    heads: Heads = 16,
    dtype: Dtype = "bfloat16",
    rounds: Rounds = 5,
    threads: Annotated[int, Option(help="Threads of PyTorch.")] = 1,
) -> None:
    """The number of query tokens at which rebuilding K and V becomes faster than absorbed attention."""
    torch.set_num_threads(threads)
    layer = Layer.of(heads, dtype)
    weight = layer.weight()
    cache, sequence = layer.cache(context)
    table = Table(title=f"{context} tokens of context, {heads} heads, {dtype}", title_justify="left")
    for column in ("query tokens", "absorbed, ms", "rebuilt, ms", "absorbed / rebuilt"):
        table.add_column(column, justify="right")
    ratios = []
    for count in sorted(new):
        seconds = in_turns(
            {
                "absorbed": layer.attending(cache, sequence, count, _ABSORB, weight),
                "rebuilt": layer.attending(cache, sequence, count, _REBUILD, weight),
            },
            rounds,
        )
        ratios.append((count, ratio(seconds["absorbed"], seconds["rebuilt"])))
        times = (f"{median(seconds[name]) * 1e3:.1f}" for name in ("absorbed", "rebuilt"))
        table.add_row(str(count), *times, f"{ratios[-1][1]:.2f}")
    Console().print(table)
    by_flops = crossover(layer.dims) / REBUILD_COST
    found = _where_equal(ratios)
    if found is None:
        typer.echo("the two do not meet in this range")
    else:
        typer.echo(
            f"equal at {found:.0f} query tokens; FLOP for FLOP at {by_flops:.0f}: REBUILD_COST = {found / by_flops:.2f}"
        )


def _where_equal(ratios: list[tuple[int, float]]) -> float | None:
    """Where a ratio passes 1 for good, interpolated on logarithmic scales."""
    for (low, before), (high, after) in reversed(list(pairwise(ratios))):
        if before < 1 <= after:
            part = math.log(1 / before) / math.log(after / before)
            return math.exp(math.log(low) + part * (math.log(high) - math.log(low)))
    return None


if __name__ == "__main__":
    app()
