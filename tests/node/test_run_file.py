"""What a run file says of the swarm is checked, one figure against the other."""

import pytest

from planaria.bootstrap.membership import Rules
from planaria.bootstrap.service import HELD_UP
from planaria.node.run_file import HEARTBEAT, LEASE, PROBE, RunFileError, loads
from planaria.node.wire.link import LinkSettings


@pytest.mark.parametrize(
    ("swarm", "problem"),
    [
        ("renew = 1.0", "renew = 1.0 is no key any more: remove it"),
        ("lease = 0.8", "swarm.lease.*greater than or equal to 1"),
        ("silence = 0.9", "swarm.silence.*greater than or equal to 1"),
        (
            "progress = 8",
            "progress = 8: with lease = 5 and silence = 3 it can take 5 s .*progress = 10 or more",
        ),
        ("progress = 50\nsilence = 30", "it can take 31.5 s .*progress = 63 or more"),
        ("progress = 50\nlease = 60", "it can take 60 s .*progress = 120 or more"),
    ],
)
def test_times_that_do_not_go_together_are_said(swarm: str, problem: str) -> None:
    with pytest.raises(RunFileError, match=problem):
        loads(f"[swarm]\n{swarm}")


def test_short_times_that_go_together_are_taken() -> None:
    run = loads("[swarm]\nlease = 1\nsilence = 1\nprogress = 5\n[recovery]\nrelearn_seconds = 2")
    assert (run.swarm.lease, run.swarm.silence, run.swarm.progress) == (1, 1, 5)


def test_the_times_are_those_of_links_and_registry() -> None:
    assert LinkSettings().heartbeat == HEARTBEAT
    assert Rules("run", 1).probe_timeout == PROBE
    assert LEASE >= HELD_UP
    LinkSettings(silence=2 * HEARTBEAT)
