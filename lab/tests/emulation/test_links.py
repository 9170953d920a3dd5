"""Tests of site tables, token buckets and pipes, all of which take times as arguments."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria_lab.emulation.links import (
    COLUMNS,
    QUEUE_BYTES,
    QUEUE_SECONDS,
    WAN_LINKS,
    WITHIN,
    Link,
    LinkError,
    Network,
    Pipe,
    TokenBucket,
    all_alike,
    read_links,
)

SENT = st.lists(
    st.tuples(st.floats(0, 0.1), st.integers(1, 65_536)), min_size=1, max_size=40
)  # seconds since the packet before, and bytes
RATES = st.floats(0.5, 1000)  # Mbit/s


def test_the_table_that_comes_with_the_project():
    links = read_links(WAN_LINKS)
    sites = {site for link in links for site in link[:2]}
    assert len(sites) == 12
    assert len({frozenset(link[:2]) for link in links}) == 12 * 11 // 2
    first = links[0]
    assert first[:3] == ("Australia", "Belgium", 129)
    assert first.mbps == pytest.approx(0.00982666015625 * 2**30 * 8 / 1e6)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a,b,ms\nx,y,3\n", "columns are a, b, ms"),
        (f"{','.join(COLUMNS)}\nx,y,near,1\n", "row 1: one_way_delay_ms and"),
        (f"{','.join(COLUMNS)}\nx,y,1\n", "row 1"),
        (f"{','.join(COLUMNS)}\nx,y,1,2\nx,z,-1,1\n", "row 2: a delay of -1 ms"),
        (f"{','.join(COLUMNS)}\nx,y,1,0\n", "0 GiB/s"),
        (f"{','.join(COLUMNS)},loss\nx,y,1,1,much\n", "row 1: .* and loss must be numbers"),
        (f"{','.join(COLUMNS)},loss\nx,y,1,1,1\n", "row 1: a loss of 1: it must be a share"),
        (f"{','.join(COLUMNS)},jitter_ms\nx,y,1,1,2\n", "a jitter of 2 ms with a delay of 1 ms"),
        (f"{','.join(COLUMNS)},lost\nx,y,1,1,0\n", "and optionally loss and jitter_ms"),
        (f"{','.join(COLUMNS)},loss,loss\nx,y,1,1,0,0\n", "and optionally loss and jitter_ms"),
    ],
)
def test_a_bad_table_is_refused_with_what_is_wrong(tmp_path, text, words):
    path = tmp_path / "sites.csv"
    path.write_text(text)
    with pytest.raises(LinkError, match=words):
        read_links(path)


@pytest.mark.parametrize(
    ("columns", "cells", "loss", "jitter"),
    [("", "", 0, 0), (",loss", ",0.01", 0.01, 0), (",jitter_ms,loss", ",4,0.01", 0.01, 4)],
)
def test_a_table_may_say_loss_and_jitter(tmp_path, columns, cells, loss, jitter):
    path = tmp_path / "sites.csv"
    path.write_text(f"{','.join(COLUMNS)}{columns}\nx,y,5,1{cells}\n")
    [link] = read_links(path)
    assert (link.loss, link.jitter_ms) == (loss, jitter)
    pipe = Network({"a": "x", "b": "y"}, [link]).pipes()["a", "b"]
    assert (pipe.loss, pipe.jitter) == (loss, jitter / 1e3)


def test_a_table_that_is_not_there(tmp_path):
    with pytest.raises(LinkError, match="can't read"):
        read_links(tmp_path / "none.csv")


def test_nodes_are_linked_as_their_sites_are():
    network = Network({"a": "x", "b": "y", "c": "x"}, [Link("y", "x", 20, 50)])
    assert network.between("a", "b") == network.between("b", "c") == Link("y", "x", 20, 50)
    assert network.between("a", "c") == Link("x", "x", *WITHIN)


def test_a_table_may_say_what_a_site_has_within():
    network = Network({"a": "x", "c": "x"}, [Link("x", "x", 3, 4)])
    assert network.between("a", "c") == Link("x", "x", 3, 4)


def test_a_link_that_the_table_lacks_is_named():
    with pytest.raises(LinkError, match="between x and z; it has links between x, y"):
        Network({"a": "x", "b": "z"}, [Link("y", "x", 20, 50)])


def test_all_alike_puts_each_node_at_a_site_of_its_own():
    network = all_alike(["a", "b", "c"], 40, 100)
    assert {network.between(*pair)[2:4] for pair in network.pipes()} == {(40, 100)}
    with pytest.raises(LinkError, match="0 Mbit/s"):
        all_alike(["a", "b"], 40, 0)


@given(RATES, SENT, st.integers(0, 100_000))
def test_a_bucket_never_passes_more_than_its_rate_and_burst(mbps, sent, burst):
    bucket, now, passed = TokenBucket(mbps, burst), 0.0, []
    for gap, size in sent:
        now += gap
        passed.append((now, bucket.passes(size, now), size))
    for (_, earlier, _), (_, later, _) in pairwise(passed):
        assert earlier <= later  # in order
    for first in range(len(passed)):
        for last in range(first, len(passed)):
            size = sum(size for _, _, size in passed[first : last + 1])
            took = passed[last][1] - passed[first][0]
            assert size <= took * mbps * 1e6 / 8 + burst + 1e-3


@given(RATES, st.lists(st.integers(1, 65_536), min_size=1, max_size=40))
def test_what_comes_at_once_takes_exactly_as_long_as_the_rate_says(mbps, sizes):
    bucket = TokenBucket(mbps)
    through = [bucket.passes(size, 5.0) for size in sizes][-1]
    assert through - 5.0 == pytest.approx(sum(sizes) * 8 / (mbps * 1e6))


def test_a_rest_refills_the_bucket():
    bucket = TokenBucket(8, burst=1000)  # one byte per microsecond
    assert bucket.passes(1000, 0.0) == 0.0
    assert bucket.passes(1000, 0.0) == pytest.approx(1e-3)
    assert bucket.passes(1000, 1.0) == 1.0


@given(RATES, SENT, st.floats(0, 0.5), st.floats(0, 1), st.text(max_size=3))
def test_packets_arrive_in_order_after_the_delay(mbps, sent, delay, share, seed):
    pipe, now, last = Pipe([TokenBucket(mbps)], delay, 0.0, share * delay, seed), 0.0, 0.0
    same = Pipe([TokenBucket(mbps)], delay, 0.0, share * delay, seed)
    for gap, size in sent:
        now += gap
        arrival = pipe.arrival(size, now)
        assert same.arrival(size, now) == arrival
        if arrival is not None:
            soonest = now + (1 - share) * delay + size * 8 / (mbps * 1e6)
            assert arrival >= max(last, soonest - 1e-9)
            last = arrival


def test_a_delay_with_jitter_is_on_average_what_it_is_without():
    pipe = Pipe([TokenBucket(1e6)], 0.05, 0.0, 0.01)
    took = []
    for number in range(20_000):
        arrival = pipe.arrival(1, number * 1e-3)
        assert arrival is not None
        took.append(arrival - number * 1e-3)
    assert 0.04 <= min(took) < 0.042
    assert 0.058 < max(took) <= 0.06 + 1e-6
    assert sum(took) / len(took) == pytest.approx(0.05, abs=1e-3)


@given(st.lists(st.integers(1, 45), min_size=1, max_size=60), st.floats(0.001, 0.9), st.text())
def test_which_segments_are_lost_does_not_depend_on_how_many_come_at_once(counts, loss, seed):
    at_once, one_by_one = (Pipe([], 0.0, loss, seed=seed) for _ in range(2))
    for count in counts:
        lost = at_once.lost(count)
        assert lost == [number for number in range(count) if one_by_one.lost(1)]


def test_so_many_are_lost_as_the_link_says():
    pipe = Pipe([], 0.0, 0.001)
    assert len(pipe.lost(10_000_000)) == pytest.approx(10_000, rel=0.05)
    assert Pipe([], 0.0).lost(10_000_000) == []


def test_a_full_queue_drops_until_it_has_drained():
    pipe = Pipe([TokenBucket(8)], 0.1)
    held = QUEUE_SECONDS + QUEUE_BYTES / 1e6  # seconds of queue at one byte per microsecond
    taken = sum(pipe.arrival(10_000, 0.0) is not None for _ in range(1000))
    assert taken * 10_000 == pytest.approx(held * 1e6, abs=10_000)
    assert pipe.arrival(10_000, 0.02) is not None
    assert pipe.arrival(10_000, 0.02) is not None
    assert pipe.arrival(10_000, 0.02) is None


def test_nodes_of_a_site_share_its_uplink_to_other_sites_only():
    sites = {"a": "x", "b": "x", "c": "y"}
    links = [Link("x", "y", 10, 80), Link("x", "x", 1, 80)]
    pipes = Network(sites, links, {"x": 8}).pipes()
    size = 100_000  # bytes: 0.1 s on the uplink, 0.01 s on a link
    assert pipes["a", "c"].arrival(size, 0.0) == pytest.approx(0.1 + 0.01 + 0.01)
    assert pipes["b", "c"].arrival(size, 0.0) == pytest.approx(0.2 + 0.01 + 0.01)
    assert pipes["a", "b"].arrival(size, 0.0) == pytest.approx(0.01 + 0.001)
    assert pipes["c", "a"].arrival(size, 0.0) == pytest.approx(0.01 + 0.01)


def test_nodes_that_are_all_alike_may_have_an_uplink_each():
    pipes = all_alike("abc", 10, 80, uplink=8).pipes()
    size = 100_000
    assert pipes["a", "b"].arrival(size, 0.0) == pytest.approx(0.1 + 0.01 + 0.01)
    assert pipes["a", "c"].arrival(size, 0.0) == pytest.approx(0.2 + 0.01 + 0.01)
    assert pipes["b", "c"].arrival(size, 0.0) == pytest.approx(0.1 + 0.01 + 0.01)


def test_an_uplink_needs_bandwidth():
    with pytest.raises(LinkError, match="uplink of 0 Mbit/s at x"):
        Network({"a": "x"}, [], {"x": 0})
