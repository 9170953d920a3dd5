"""Site tables, token buckets and pipes: figures and times in, times out."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.lab.emulation.links import (
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
)  # seconds since the one before, bytes
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
    ],
)
def test_a_bad_table_is_refused_with_what_is_wrong(tmp_path, text, words):
    path = tmp_path / "sites.csv"
    path.write_text(text)
    with pytest.raises(LinkError, match=words):
        read_links(path)


def test_a_table_that_is_not_there(tmp_path):
    with pytest.raises(LinkError, match="can't read"):
        read_links(tmp_path / "none.csv")


def test_nodes_are_linked_as_their_sites_are():
    network = Network({"a": "x", "b": "y", "c": "x"}, [Link("y", "x", 20, 50)])
    assert network.between("a", "b") == network.between("b", "c") == Link("y", "x", 20, 50)
    assert network.between("a", "c") == ("x", "x", *WITHIN)


def test_a_table_may_say_what_a_site_has_within():
    network = Network({"a": "x", "c": "x"}, [Link("x", "x", 3, 4)])
    assert network.between("a", "c") == Link("x", "x", 3, 4)


def test_a_link_that_the_table_lacks_is_named():
    with pytest.raises(LinkError, match="between x and z; it has links between x, y"):
        Network({"a": "x", "b": "z"}, [Link("y", "x", 20, 50)])


def test_all_alike_puts_each_node_at_a_site_of_its_own():
    network = all_alike(["a", "b", "c"], 40, 100)
    assert {network.between(*pair)[2:] for pair in network.pipes()} == {(40, 100)}
    with pytest.raises(LinkError, match="0 Mbit/s"):
        all_alike(["a", "b"], 40, 0)


@given(RATES, SENT, st.integers(0, 100_000))
def test_a_bucket_never_passes_more_than_its_rate_and_burst(mbps, sent, burst):
    bucket, now, passed = TokenBucket(mbps, burst), 0.0, []
    for gap, size in sent:
        now += gap
        passed.append((now, bucket.passes(size, now), size))
    for (_, earlier, _), (_, later, _) in pairwise(passed):
        assert earlier <= later  # nothing overtakes
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
    bucket = TokenBucket(8, burst=1000)  # a byte in a microsecond
    assert bucket.passes(1000, 0.0) == 0.0
    assert bucket.passes(1000, 0.0) == pytest.approx(1e-3)
    assert bucket.passes(1000, 1.0) == 1.0


@given(RATES, SENT, st.floats(0, 0.5))
def test_packets_arrive_in_order_after_the_delay(mbps, sent, delay):
    pipe, now, last = Pipe([TokenBucket(mbps)], delay), 0.0, 0.0
    for gap, size in sent:
        now += gap
        arrival = pipe.arrival(size, now)
        if arrival is not None:
            assert arrival >= max(last, now + delay + size * 8 / (mbps * 1e6) - 1e-9)
            last = arrival


def test_a_full_queue_drops_until_it_has_drained():
    pipe = Pipe([TokenBucket(8)], 0.1)
    held = QUEUE_SECONDS + QUEUE_BYTES / 1e6  # seconds of a queue at a byte in a microsecond
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
