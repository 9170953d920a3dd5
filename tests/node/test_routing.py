from hypothesis import given
from hypothesis import strategies as st

from node.routing import Routing, earliest_finish, share_out


def test_a_node_half_as_fast_is_given_half_as_many():
    sources = share_out(range(30), ["a", "b"], {"a": 1.0, "b": 2.0})
    assert (sources.count("a"), sources.count("b")) == (20, 10)


def test_without_measurements_the_shares_are_equal():
    sources = share_out(range(12), ["a", "b", "c"], {})
    assert [sources.count(node) for node in "abc"] == [4, 4, 4]


def test_a_new_node_counts_as_average():
    assert earliest_finish(["a", "b"], {"a": 1}, {"a": 3.0}) == "b"


def run_stage(speeds: dict[str, float], microbatches: int, in_flight: int) -> dict[str, int]:
    """Serve all microbatches on queues of the given seconds a microbatch, in virtual time."""
    routing = Routing("source", in_flight)
    routing.begin({1: tuple(speeds)}, [(i, (1,)) for i in range(microbatches)])
    free_at = dict.fromkeys(speeds, 0.0)
    arrivals: list[tuple[float, int, str]] = []
    done = dict.fromkeys(speeds, 0)
    now = 0.0
    while True:
        while (injected := routing.inject()) is not None:
            identity, route = injected
            node = route.nodes[1]
            free_at[node] = max(free_at[node], now) + speeds[node]
            arrivals.append((free_at[node], identity, node))
        if not arrivals:
            return done
        arrivals.sort()
        now, identity, node = arrivals.pop(0)
        done[node] += 1
        routing.home(identity, {node: speeds[node]})


def test_half_speed_gets_about_half_of_the_work_in_a_running_pipeline():
    done = run_stage({"fast": 1.0, "slow": 2.0}, 300, in_flight=6)
    assert 0.45 <= done["slow"] / done["fast"] <= 0.55


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=5), st.integers(1, 40), st.integers(1, 8))
def test_every_microbatch_is_served_once_within_the_window(speeds, microbatches, in_flight):
    named = {f"n{i}": s for i, s in enumerate(speeds)}
    assert sum(run_stage(named, microbatches, in_flight).values()) == microbatches


def test_the_window_bounds_what_is_out():
    routing = Routing("s", 2)
    routing.begin({1: ["a"], 2: ["b"]}, [(i, (1, 2)) for i in range(3)])
    assert routing.inject()[1].nodes == ("s", "a", "b", "s")
    assert routing.inject() is not None
    assert routing.inject() is None
    routing.home(0, {})
    assert routing.inject()[0] == 2
