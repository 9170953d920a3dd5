"""What a run file says of the swarm is checked, one figure against the other."""

from typing import Any

import pytest
import tomli_w

from planaria.bootstrap.membership import MembershipRules
from planaria.bootstrap.service import HELD_UP
from planaria.lab.convergence.training import Ablation
from planaria.node.run_file import HEARTBEAT, LEASE, PROBE, RunFileError, from_fields, loads
from planaria.node.wire.link import LinkSettings


@pytest.mark.parametrize(
    ("swarm", "problem"),
    [
        ("renew = 1.0", "swarm.renew: is no key any more: remove it; .*value: 1.0"),
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
    run = loads("[swarm]\nlease = 1\nsilence = 1\nprogress = 5\n[recovery.relearn]\nseconds = 2")
    assert (run.swarm.lease, run.swarm.silence, run.swarm.progress) == (1, 1, 5)


MOVED = {
    "relearn": {"steps": 4, "samples": 0, "passes": 3, "seconds": 5.0, "lr": 0.1},
    "snapshot": {"fraction": 0.5, "period": 4, "codec": "none", "moments": False, "mbps": 9.0},
    "checkpoint": {"dir": "/mnt/shared", "every": 3},
}


@pytest.mark.parametrize(
    ("table", "key", "value"), [(t, k, v) for t, keys in MOVED.items() for k, v in keys.items()]
)
def test_a_key_that_has_moved_says_where_and_works_there(table: str, key: str, value: Any) -> None:
    line = tomli_w.dumps({f"{table}_{key}": value})
    with pytest.raises(RunFileError) as told:
        loads(f"[recovery]\n{line}", "old.toml")
    assert str(told.value) == (
        "old.toml is not a valid run file:\n"
        f"  recovery.{table}_{key}: is now {key} in [recovery.{table}] (value: {value!r})"
    )
    run = loads(f"[recovery.{table}]\n{tomli_w.dumps({key: value})}")
    assert run.recovery.model_dump(exclude_defaults=True) == {table: {key: value}}


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("recovery", "omega", "uniform"),
        ("recovery", "stage0_moments", True),
        ("recovery", "snapshot_choice", "round"),
        ("training", "clip_scope", "stage"),
    ],
)
def test_what_only_studies_varied_is_an_ablation_now(section: str, key: str, value: Any) -> None:
    said = f"{section}.{key}: is no key any more: remove it; a study .* varies ablation.{key} "
    with pytest.raises(RunFileError, match=said):
        from_fields({section: {key: value}})
    assert getattr(Ablation.model_validate({key: value}), key) == value


@pytest.mark.parametrize("key", ["recovery.checkpoint_writes", "saves.writes"])
def test_training_always_goes_on_while_a_save_is_written(key: str) -> None:
    with pytest.raises(RunFileError, match=f"{key}: is no key any more: remove it; training goes"):
        loads(f'{key} = "blocking"')


def test_a_file_of_an_older_planaria_is_told_all_that_has_changed() -> None:
    old = {f"{table}_{key}": value for table, keys in MOVED.items() for key, value in keys.items()}
    with pytest.raises(RunFileError) as told:
        from_fields({"recovery": {"policy": "snapshot", "omega": "squared", **old}})
    assert str(told.value).count("\n  recovery.") == len(old) + 1


def test_the_times_are_those_of_links_and_registry() -> None:
    assert LinkSettings().heartbeat == HEARTBEAT
    assert MembershipRules("run", 1).probe_timeout == PROBE
    assert LEASE >= HELD_UP
    LinkSettings(silence=2 * HEARTBEAT)
