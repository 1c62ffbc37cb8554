"""Fixtures of all tests: worker ranks, a private network, and uninitialised memory that reads as NaN."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest

from tests import netns
from tests.pool import RankGroup, RankPool, poisoned_memory


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankGroup]]:
    """``ranks(P).run(fn, *args)`` runs ``fn(ctx, *args)`` as P ranks, see :mod:`tests.pool`."""
    pool = RankPool()
    yield lambda size: RankGroup(pool, size)
    pool.close()


@pytest.fixture(scope="session")
def private_network() -> Iterator[netns.PrivateNetwork]:
    """``private_network.run(fn, P, *args)`` also counts the bytes on the wire, see :mod:`tests.netns`."""
    if not netns.available():
        pytest.skip("needs root, iproute2 and unshare")
    network = netns.PrivateNetwork()
    yield network
    network.close()


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    with poisoned_memory():
        yield


@pytest.fixture(scope="module", autouse=True)
def _quick_collections() -> None:
    """Leave what is imported by now out of garbage collections: a trace begins with one, of 0.2 s with all of torch."""
    gc.collect()
    gc.freeze()
