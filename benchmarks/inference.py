"""Prefill and decode against the other ways of doing them, on this machine's CPU.

Every command measures its candidates in turns, one of each in every round: a ratio is the median of the ratios inside
rounds, with its quartiles, which is what a busy machine leaves undisturbed. One thread per process. Where nothing
waits for another process, time is CPU time. Head sizes are DeepSeek-V3's, with fewer heads. Tables are Markdown.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median, quantiles
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor
from torch.nn import functional as F
from typer import Option

import laga_attn as laga
from laga_attn.attention_plan import LatentDims
from laga_attn.bench.malloc import keep_freed_memory
from laga_attn.bench.ranks import run_on_ranks
from laga_attn.inference import LatentCache, attend
from laga_attn.inference.attention import REBUILD_COST, crossover

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False)

Heads = Annotated[int, Option(help="Attention heads.")]
Rounds = Annotated[int, Option(help="Rounds after one of warm-up.")]
Dtype = Annotated[str, Option(help="bfloat16 or float32.")]
Lengths = Annotated[list[int], Option(help="Repeat the option for several.")]
Seconds = list[float]

_ABSORB, _REBUILD = 2**40, 1  # values of rebuild_from


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
    candidates: dict[str, Callable[[], object]], rounds: int, clock: Callable[[], float] = time.process_time
) -> dict[str, Seconds]:
    """Seconds of each candidate in each round, after one round of warm-up."""
    keep_freed_memory()
    seconds: dict[str, Seconds] = {name: [] for name in candidates}
    for turn in range(rounds + 1):
        for name, call in candidates.items():
            if dist.is_initialized():
                dist.barrier()
            start = clock()
            call()
            if turn:
                seconds[name].append(clock() - start)
    return seconds


def slowest(by_rank: Sequence[dict[str, Seconds]]) -> dict[str, Seconds]:
    """The seconds of the slowest rank in each round."""
    return {name: [max(turn) for turn in zip(*(rank[name] for rank in by_rank), strict=True)] for name in by_rank[0]}


def ratio(over: Seconds, under: Seconds) -> str:
    """Median of the ratios inside rounds, and their quartiles."""
    inside = [a / b for a, b in zip(over, under, strict=True)]
    low, middle, high = quantiles(inside, n=4, method="inclusive")
    return f"{middle:.2f} ({low:.2f} .. {high:.2f})"


def milliseconds(seconds: Seconds) -> str:
    return f"{median(seconds) * 1e3:.1f}"


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A Markdown table."""
    typer.echo(f"{title}\n\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for row in rows:
        typer.echo(f"| {' | '.join(row)} |")


def world() -> laga.ContextParallel:
    """All processes."""
    return laga.ContextParallel.none() if dist.get_world_size() == 1 else laga.ContextParallel(dist.group.WORLD)


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
    per_rank = run_on_ranks(_prefill_rank, ranks, lengths, heads, dtype, rounds)
    rows = []
    for length, *by_rank in zip(lengths, *per_rank, strict=True):
        cell = slowest(by_rank)
        base = cell.pop("explicit U=P")
        rows.append([str(length), milliseconds(base), *(ratio(seconds, base) for seconds in cell.values())])
    columns = ["prompt", "explicit U=P, ms", "laga U=1, x", "laga U=P, x", "absorbed U=P, x"]
    show(f"Prefill of one layer, {ranks} ranks, {heads} heads, {dtype}; x: times the time of explicit", columns, rows)


def _prefill_rank(lengths: list[int], heads: int, dtype: str, rounds: int) -> list[dict[str, Seconds]]:
    layer = Layer.of(heads, dtype)
    weight = layer.weight()
    results = []
    for length in lengths:
        layout = laga.SequenceLayout.zigzag(length, dist.get_world_size())
        tokens = layer.tokens(layout.local_len)
        candidates: dict[str, Callable[[], object]] = {}
        candidates["explicit U=P"] = _without_cache(layer, tokens, weight, layout, "explicit")
        for name, degree in (("laga U=1", 1), ("laga U=P", dist.get_world_size())):
            candidates[name] = layer.attending(*layer.cache(0, world().with_ulysses(degree)), length, _REBUILD, weight)
        candidates["absorbed U=P"] = _without_cache(layer, tokens, weight, layout, "absorbed")
        results.append(in_turns(candidates, rounds, time.perf_counter))
    return results


def _without_cache(
    layer: Layer, tokens: tuple[Tensor, ...], weight: Tensor, layout: laga.SequenceLayout, scheme: str
) -> Callable[[], Tensor]:
    cp = world().with_ulysses(dist.get_world_size())
    q, c_kv, k_rope = tokens

    def call() -> Tensor:
        with torch.no_grad():
            return laga.latent_attention(
                q, c_kv, k_rope, weight, layout=layout, cp=cp, scheme=scheme,
                qk_nope_head_dim=layer.dims.qk_nope_head_dim, v_head_dim=layer.dims.v_head_dim,
            )  # fmt: skip

    return call


# Decode: absorbed on the cache, rebuilt every step, Transformers' own cache, and a cache of full K and V.


@app.command()
def decode(
    lengths: Lengths = [1024, 4096, 16384, 65536],  # noqa: B006
    heads: Heads = 16,
    dtype: Dtype = "bfloat16",
    rounds: Rounds = 5,
) -> None:
    """CPU time of one token over a context, and what its cache takes.

    Transformers 5.24 stores latents too and rebuilds K and V from all of them at every step ("Transformers"); versions
    before stored K and V of every head ("full K/V": here without the copy that growing their tensors costs).
    """
    torch.set_num_threads(1)
    layer = Layer.of(heads, dtype)
    weight = layer.weight()
    rows, held = [], {}
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
        times = [ratio(seconds[name], own) for name in ("rebuilt", "Transformers", "full")]
        rows.append([str(length), milliseconds(own), milliseconds(seconds["rebuilt"]), *times])
        held = {"absorbed": cache.memory().total, "Transformers": stock_bytes, "full K/V": full_bytes}
    columns = ["context", "absorbed, ms", "rebuilt, ms", "rebuilt, x", "Transformers, x", "full K/V, x"]
    show(f"Decode of one layer, one process, {heads} heads, {dtype}; x: times the time of absorbed", columns, rows)
    sizes = ", ".join(f"{name} {size / lengths[-1]:.0f}" for name, size in held.items())
    typer.echo(f"\nBytes of cache per token and layer: {sizes}.")


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
    key = torch.randn(1, dims.num_heads, length + 1, dims.qk_head_dim, dtype=layer.dtype)
    value = torch.randn(1, dims.num_heads, length + 1, dims.v_head_dim, dtype=layer.dtype)
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
    """CPU time of one token on the busiest rank, over contexts and numbers of ranks.

    CPU time, which ranks that share a core do not take from each other; messages are counted in bytes.
    """
    per_rank = run_on_ranks(_decode_rank, max(sizes), lengths, sizes, heads, dtype, rounds)
    rows = []
    for length, *by_rank in zip(lengths, *per_rank, strict=True):
        seconds = slowest([times for times, _ in by_rank])
        for size in sizes:
            used, sent = (max(facts[size][i] for _, facts in by_rank if size in facts) for i in (0, 1))
            times = (milliseconds(seconds[str(size)]), ratio(seconds[str(size)], seconds[str(sizes[0])]))
            rows.append([str(length), str(size), *times, f"{used / 2**20:.2f}", str(sent)])
    columns = ["context", "P", "CPU ms on the busiest rank", f"x of P={sizes[0]}", "cache MiB per rank", "bytes sent"]
    show(f"Decode of one token in one layer, {heads} heads, {dtype}", columns, rows)


def _decode_rank(
    lengths: list[int], sizes: list[int], heads: int, dtype: str, rounds: int
) -> list[tuple[dict[str, Seconds], dict[int, tuple[int, int]]]]:
    """The first ranks work as P = 1, 2, ... in turns, while the others wait."""
    layer = Layer.of(heads, dtype)
    weight = layer.weight()
    groups = {size: dist.new_group(list(range(size))) for size in sizes}
    results = []
    for length in lengths:
        calls: dict[str, Callable[[], object]] = {}
        facts = {}
        for size in sizes:
            calls[str(size)] = lambda: None
            if dist.get_rank() >= size:
                continue
            cp = laga.ContextParallel.none() if size == 1 else laga.ContextParallel(groups[size])
            cache, sequence = layer.cache(length, cp)
            calls[str(size)] = layer.attending(cache, sequence, 1, _ABSORB, weight)
            with laga.traffic() as ledger:
                calls[str(size)]()
            facts[size] = (cache.memory().used[cp.rank], ledger.sent())
        results.append((in_turns(calls, rounds), facts))
    return results


# Crossover.


@app.command(name="crossover")
def measure_crossover(
    context: Annotated[int, Option(help="Tokens in the cache.")] = 4096,
    new: Annotated[list[int], Option(help="Query tokens; repeat the option for several.")] = [64, 128, 192, 256, 384],  # noqa: B006
    ranks: Annotated[int, Option(help="Processes that share cache and queries.")] = 1,
    heads: Heads = 16,
    dtype: Dtype = "bfloat16",
    rounds: Rounds = 5,
) -> None:
    """The number of query tokens at which rebuilding K and V becomes faster than absorbed attention.

    CPU time on the busiest rank. Over P ranks, U = 1 rebuilds everything on each of them, U = P each head on one.
    """
    per_rank = run_on_ranks(_crossover_rank, ranks, context, sorted(new), heads, dtype, rounds)
    rows, curves = [], dict[str, list[tuple[int, float]]]()
    for count, *by_rank in zip(sorted(new), *per_rank, strict=True):
        cell = slowest(by_rank)
        absorbed = cell.pop("absorbed")
        for name, seconds in cell.items():
            curves.setdefault(name, []).append((count, median(a / b for a, b in zip(absorbed, seconds, strict=True))))
        rebuilt = [text for seconds in cell.values() for text in (milliseconds(seconds), ratio(absorbed, seconds))]
        rows.append([str(count), milliseconds(absorbed), *rebuilt])
    columns = [text for name in curves for text in (f"{name}, ms", "absorbed over it")]
    title = f"{context} tokens of context, P = {ranks}, {heads} heads, {dtype}, one layer"
    show(title, ["query tokens", "absorbed, ms", *columns], rows)
    by_flops = crossover(Layer.of(heads, dtype).dims) / REBUILD_COST
    for name, curve in curves.items():
        found = _where_equal(curve)
        where = "the two do not meet in this range"
        if found is not None:
            where = f"equal at {found:.0f} query tokens, {found / by_flops:.2f} of where one process has equal FLOPs"
        typer.echo(f"\n{name}: {where}")


def _crossover_rank(context: int, new: list[int], heads: int, dtype: str, rounds: int) -> list[dict[str, Seconds]]:
    layer = Layer.of(heads, dtype)
    weight = layer.weight()
    size = dist.get_world_size()
    absorbing = layer.cache(context, world())
    rebuilding = {f"rebuilt U={u}": layer.cache(context, world().with_ulysses(u)) for u in sorted({1, size})}
    results = []
    for count in new:
        calls: dict[str, Callable[[], object]] = {"absorbed": layer.attending(*absorbing, count, _ABSORB, weight)}
        for name, cache in rebuilding.items():
            calls[name] = layer.attending(*cache, count, _REBUILD, weight)
        results.append(in_turns(calls, rounds))
    return results


def _where_equal(curve: list[tuple[int, float]]) -> float | None:
    """Where a ratio passes 1 for good, interpolated on logarithmic scales."""
    for (low, before), (high, after) in reversed(list(pairwise(curve))):
        if before < 1 <= after:
            part = math.log(1 / before) / math.log(after / before)
            return math.exp(math.log(low) + part * (math.log(high) - math.log(low)))
    return None


if __name__ == "__main__":
    app()
