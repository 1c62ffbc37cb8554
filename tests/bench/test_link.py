"""The shaped cable between two nodes: its syntax, what it really does, and that nothing of it stays."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch.distributed as dist

from laga_attn.bench import link as link_module
from laga_attn.bench.link import Link, node_size, parse_link, received_rate, set_link, two_nodes
from laga_attn.bench.ranks import Place, run_on_ranks
from laga_attn.train.errors import UsageError
from tests import netns

needs_namespaces = pytest.mark.skipif(
    not netns.available() or shutil.which("tc") is None, reason="needs root, iproute2 and unshare"
)


@pytest.mark.parametrize(
    ("text", "rate", "latency"),
    [("100mbit", 1e8, 0.0), ("2.5gbit,0.2ms", 2.5e9, 2e-4), ("64kbit,1s", 64e3, 1.0), ("1gbit,50us", 1e9, 5e-5)],
)
def test_a_link_is_a_rate_and_perhaps_a_latency(text, rate, latency):
    link = parse_link(text)
    assert link.rate == pytest.approx(rate)
    assert link.latency == pytest.approx(latency)
    assert parse_link(str(link)) == link


@pytest.mark.parametrize("text", ["", "100", "mbit", "0mbit", "-1mbit", "10mbps", "1gbit,", "1gbit,5", "1gbit 5ms"])
def test_another_syntax_is_refused_with_the_right_one(text):
    with pytest.raises(UsageError, match=r"is not RATE\[,LATENCY\]; write a number .* 100mbit, 2.5gbit,0.2ms"):
        parse_link(text)


def test_an_odd_number_of_ranks_has_no_two_nodes():
    assert [node_size(4), node_size(2)] == [2, 1]
    with pytest.raises(UsageError, match="--link needs an even number of ranks, to place them in two nodes; got 3"):
        node_size(3)


def enter() -> None:
    with two_nodes([Link(1e9)]):
        pytest.fail("there is no way to get here")


def test_without_root_it_says_so_in_one_line(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(UsageError, match="which needs root; run it as root or leave --link out"):
        enter()


def test_without_its_commands_it_names_them(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "tc" else f"/bin/{name}")
    with pytest.raises(UsageError, match="iproute2 and util-linux; not found: tc"):
        enter()


def test_a_refusal_of_the_kernel_is_reported_with_the_command_in_one_line(monkeypatch):
    def refuse(command, **_):
        return subprocess.CompletedProcess(command, 2, "", "RTNETLINK answers:\n Operation not permitted\n")

    monkeypatch.setattr(subprocess, "run", refuse)
    with pytest.raises(UsageError) as caught:
        link_module._run(["ip", "link", "add"])
    assert "refused `ip link add`: RTNETLINK answers: Operation not permitted" in str(caught.value)
    with pytest.raises(UsageError, match=r"netem queue .* not there .*; leave the latency out"):
        link_module._run(["tc", "root", "netem"])


def burst_of(link: Link) -> int:
    command = link_module._shape(link)
    return int(command[command.index("burst") + 1].removesuffix("b"))


def test_fast_links_pass_whole_what_tcp_hands_down_and_slow_ones_hardly_more_than_their_rate():
    assert all(burst_of(Link(rate)) > 2**16 + 100 for rate in (1e8, 3e8, 7e8, 1e9, 1e10))
    assert all(burst_of(Link(rate)) * 8 / rate <= 0.01 for rate in (1e7, 2e7, 5e7))


def rates_and_peers(links: tuple[Link, ...]) -> tuple[list[float | None], list[str]]:
    rates = []
    for link in links:
        set_link(link)
        rates.append(received_rate(link))
    mine = Path("/proc/self/net/dev").read_text()
    dist.barrier()
    return rates, [line.split(":")[0].strip() for line in mine.splitlines() if ":" in line]


@needs_namespaces
def test_the_rate_is_in_force_and_changes_while_ranks_run():
    links = (Link(8e6), Link(80e6))
    with two_nodes(links) as nodes:
        (first, devices), (second, _) = run_on_ranks(rates_and_peers, 2, links, places=nodes)
    assert first == [None, None]
    for link, rate in zip(links, second, strict=True):
        assert rate is not None
        assert 0.5 * link.rate < rate < 1.05 * link.rate  # less only where the machine is too busy to keep up
    assert {"lo", "laga0"} <= set(devices)
    assert "eth0" not in devices  # nothing but the cable leads out of a node


def namespaces_alive(nodes: tuple[Place, ...]) -> list[bool]:
    return [Path(str(node.namespace)).exists() for node in nodes]


@needs_namespaces
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_nothing_stays_whatever_ends_it(error):
    seen: list[tuple[Place, ...]] = []

    def interrupted() -> None:
        with two_nodes([Link(1e9)]) as nodes:
            seen.append(nodes)
            assert namespaces_alive(nodes) == [True, True]
            raise error

    with pytest.raises(error):
        interrupted()
    assert namespaces_alive(seen[0]) == [False, False]
    assert "laga0" not in subprocess.run(["ip", "link"], capture_output=True, text=True, check=True).stdout


def refusal(link: Link) -> str:
    """Why this machine cannot have such a link; empty if it can."""
    try:
        with two_nodes([link]) as nodes:
            return "" if all(namespaces_alive(nodes)) else "dead nodes"
    except UsageError as error:
        return str(error)


@needs_namespaces
def test_a_latency_works_where_the_kernel_has_netem_and_is_refused_in_one_line_elsewhere():
    assert refusal(parse_link("1gbit")) == ""
    reason = refusal(parse_link("1gbit,2ms"))
    assert reason == "" or re.fullmatch(r"--link with a latency needs .* netem .*; leave the latency out", reason)
