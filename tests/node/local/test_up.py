"""Tests of what `planaria up` decides before and after it runs; tests/swarm has its processes."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import signal
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from planaria.bootstrap.stop_signals import stop_signals
from planaria.node.cli import app
from planaria.node.data.corpus import CorpusError
from planaria.node.data.prepare import prepare
from planaria.node.data.recipe import Recipe
from planaria.node.launch.errors import SwarmError
from planaria.node.launch.options import parse_seats
from planaria.node.launch.resolve import registry_rules, resolve, run_id, text_to_prepare
from planaria.node.local import swarm
from planaria.node.local.loss_schedule import Kill, choose_losses, parse_kill
from planaria.node.local.machine_size import (
    MachineSize,
    check_gpu,
    check_processes,
    forecast,
    speed_of_a_core,
)
from planaria.node.local.plan import SwarmPlan, create_folder, read_plan, resume_from, write_plan
from planaria.node.local.results import Ending, read_events, shortcomings, wrap_up
from planaria.node.report.live_view import LiveScreen
from planaria.node.run_file import RunFile, dumps, loads, override
from tests.node.report.lines import entry

RUN = loads("steps = 40\ntraining.optimizer = 'adamw'\n[model]\nstages = 4\n[swarm]\nreplicas = 2")


def begin(plan: SwarmPlan) -> None:
    create_folder(plan)
    write_plan(plan)


@pytest.mark.parametrize(
    ("text", "kill", "slots"),
    [
        ("2@15", Kill(2, None, 15), ["2.0", "2.1"]),
        ("3.1@25", Kill(3, 1, 25), ["3.1"]),
        ("0.0@40", Kill(0, 0, 40), ["0.0"]),
    ],
)
def test_a_kill_names_its_slots(text, kill, slots):
    assert parse_kill(text, RUN) == kill
    assert kill.slots(RUN.swarm.replicas) == slots


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("5@15", "no stage 5, choose 0 to 4"),
        ("2.2@15", "no replica 2, choose 0 to 1"),
        ("2@0", "no step 0, choose 1 to 40"),
        ("2@41", "no step 41, choose 1 to 40"),
        ("2", "write STAGE@STEP"),
        ("2.@3", "write STAGE@STEP"),
        ("-1@3", "write STAGE@STEP"),
        ("two@3", "write STAGE@STEP"),
    ],
)
def test_a_bad_kill_is_refused_with_what_is_valid(text, says):
    with pytest.raises(SwarmError, match=re.escape(says)):
        parse_kill(text, RUN)


@pytest.mark.parametrize("name", ["summary.json", "ledger.jsonl", "logs"])
def test_a_folder_with_a_run_in_it_is_refused(tmp_path, name):
    (tmp_path / name).touch()
    with pytest.raises(SwarmError, match=f"already holds a run.*{name}.*--out"):
        create_folder(SwarmPlan(RUN, tmp_path, None, "cpu"))


def test_a_model_larger_than_this_machine_is_refused(tmp_path):
    run = loads("[model]\npreset = 'large'\nvocabulary = 65000")
    plan = SwarmPlan(run, tmp_path, None, "cpu")
    says = r"7 stages with .* need 48.\d GiB, 22.\d GiB .* this machine has 32.0 GiB: .*--oversub"
    with pytest.raises(SwarmError, match=says):
        check_processes(plan, MachineSize(32 * 2**30, 2))
    check_processes(plan, MachineSize(49 * 2**30, 2))
    with pytest.raises(
        SwarmError, match=r"need 18.\d GiB, 0.0 GiB of it for weights.* has 16.0 GiB"
    ):
        check_processes(plan._replace(device="cuda:0"), MachineSize(16 * 2**30, 2))
    check_processes(plan._replace(device="cuda:0"), MachineSize(20 * 2**30, 2))


@pytest.mark.parametrize(
    ("policy", "least"),
    [("checkpoint", 22.8), ("checkfree", 33.7), ("redundant", 44.8), ("auto", 48.7)],
)
def test_what_a_policy_keeps_takes_memory(policy, least, tmp_path):
    run = override(loads("[model]\npreset = 'large'\nvocabulary = 65000"), recovery__policy=policy)
    plan = SwarmPlan(run, tmp_path, None, "cpu")
    check_processes(plan, MachineSize(round((least + 0.1) * 2**30), 2))
    with pytest.raises(SwarmError, match=f"recovery.policy = {policy} keeps"):
        check_processes(plan, MachineSize(round((least - 0.1) * 2**30), 2))


def test_size_memory_and_time_are_said_before_a_swarm_starts(tmp_path):
    run = loads("steps = 9\n[model]\npreset = 'large'\nvocabulary = 2048")
    plan = SwarmPlan(run, tmp_path, None, "cpu")
    size, warning, time = forecast(plan, MachineSize(24 * 2**30, 2), lambda: 1e11)
    parameters = 1_619_101_696
    assert size.startswith(f"{parameters:,} parameters at 7 nodes, which take about 85.7 GiB of")
    assert warning.startswith("WARNING: that is more than this machine has")
    square, wide = 6 * 2048**3, 4 * 2048**2 * 8192 + 2 * 2048**3
    orthogonalizing = 5 * 24 * (4 * square + 3 * wide)  # by Muon
    minutes = (6 * parameters * 65536 + orthogonalizing) / 2e11 / 60
    assert time == f"a step of 65,536 tokens takes at least {minutes:.0f} min here; the run has 9"
    assert len(list(forecast(plan, MachineSize(86 * 2**30, 2), lambda: 1e11))) == 2
    on_gpu = list(forecast(plan._replace(device="cuda:0"), MachineSize(2**34, 2), lambda: 1 / 0))
    assert on_gpu == [
        f"{parameters:,} parameters at 7 nodes, which take about 13.0 GiB of this "
        "machine's 16.0 GiB of memory"
    ]
    assert speed_of_a_core() > 1e6


@pytest.mark.parametrize(("optimizer", "least"), [("muon", "7 min"), ("adamw", "12 s")])
def test_each_replicas_muon_counts_in_the_least_time_of_a_step(optimizer, least, tmp_path):
    training = f"[training]\noptimizer = '{optimizer}'\nbatch = 1\nmicrobatch = 1"
    model = "[model]\npreset = 'medium'\nvocabulary = 2048\ncontext = 256\n"
    run = loads(f"[swarm]\nreplicas = 2\n{model}{training}")
    machine = MachineSize(2**36, 1)
    _, time = forecast(SwarmPlan(run, tmp_path, None, "cpu"), machine, lambda: 5e10)
    assert f"takes at least {least} here" in time


BLOCK = (("experts", (64, 8, 8)),)
EXPERTS = {"source": "transformers", "ends": (("embed", (9, 8)),), "block": BLOCK}


@pytest.mark.parametrize("changes", [{"training__precision": "bf16"}, {"model__parts": EXPERTS}])
def test_no_least_time_is_said_where_a_step_may_be_faster(changes, tmp_path):
    run = override(loads("[model]\nvocabulary = 2048"), **changes)
    [size] = forecast(SwarmPlan(run, tmp_path, None, "cpu"), MachineSize(2**36, 1), lambda: 1e11)
    assert "of memory" in size


@pytest.mark.parametrize(("machine", "swarm"), [(24, "22.2"), (16, "16.0"), (8, "14.8")])
def test_a_swarm_keeps_as_many_microbatches_as_there_is_memory_for(machine, swarm, tmp_path):
    training = "[training]\nbatch = 8\nmicrobatch = 2"
    run = loads(f"[model]\npreset = 'medium'\nvocabulary = 2048\ncontext = 512\n{training}")
    plan = SwarmPlan(run, tmp_path, None, "cpu")
    size, *warnings, _ = forecast(plan, MachineSize(machine * 2**30, 2), lambda: 1e11)
    assert f"take about {swarm} GiB of this machine's {machine}.0 GiB" in size
    assert len(warnings) == (machine == 8)


def test_more_nodes_than_a_machine_can_have_are_refused(tmp_path):
    run = loads("[model]\nstages = 100\nlayers = 100\nvocabulary = 512")
    plan = SwarmPlan(run, tmp_path, None, "cpu")
    with pytest.raises(SwarmError, match=r"are 101 nodes, .* 2 cores .* only 32 .*--oversubscribe"):
        check_processes(plan, MachineSize(2**40, 2))
    with pytest.raises(SwarmError, match=r"101 nodes, which need 1\d.\d GiB, .* has 8.0 GiB"):
        check_processes(plan, MachineSize(2**33, 8))
    check_processes(plan, MachineSize(2**34, 8))


@pytest.mark.parametrize(("gpus", "says"), [(0, "none"), (1, "cuda:0,"), (7, "cuda:0 to cuda:6")])
def test_a_gpu_that_is_not_there_is_missed_at_once(gpus, says):
    with pytest.raises(SwarmError, match=f"--device cuda:7: this machine has {says}"):
        check_gpu("cuda:7", lambda: gpus)
    check_gpu("cpu", lambda: 0)
    check_gpu("cuda", lambda: 1)
    check_gpu("cuda:7", lambda: 8)


def test_a_folder_with_saves_of_another_run_is_refused(tmp_path):
    (tmp_path / "saves/1.0/stage-1").mkdir(parents=True)
    (tmp_path / "saves/1.0/stage-1/step-00000010-0.safetensors").touch()
    with pytest.raises(SwarmError, match="--resume"):
        create_folder(SwarmPlan(RUN, tmp_path / "out", tmp_path / "saves", "cpu"))
    assert not (tmp_path / "out").exists()


def test_a_plan_is_found_from_either_folder_and_moves_with_them(tmp_path):
    run = override(RUN, recovery__policy="checkpoint", data__path=str(tmp_path / "data"))
    run = override(run, recovery__checkpoint__dir=str(tmp_path / "old/out/checkpoints"))
    plan = SwarmPlan(run, tmp_path / "old/out", tmp_path / "old/saves", "cpu")
    begin(plan)
    assert read_plan(plan.out) == read_plan(tmp_path / "old/saves") == plan
    (tmp_path / "old").rename(tmp_path / "new")
    for folder in ("out", "saves"):
        moved = read_plan(tmp_path / "new" / folder)
        assert (moved.out, moved.save_dir) == (tmp_path / "new/out", tmp_path / "new/saves")
        assert moved.kept.checkpoints == tmp_path / "new/out/checkpoints"
        with pytest.raises(SwarmError, match=r"prepared data is not in .*data: .* by --data DIR"):
            resume_from(moved, moved, ["1.0"])


def test_what_cannot_be_resumed_says_why(tmp_path):
    with pytest.raises(SwarmError, match=r"there is no run in .* Name the folder"):
        read_plan(tmp_path)
    plan = SwarmPlan(RUN, tmp_path / "out", None, "cpu")
    begin(plan)
    with pytest.raises(SwarmError, match="has no saves: it was started without"):
        read_plan(tmp_path / "out")


@pytest.mark.parametrize("given, device", [([], "cuda:99"), (["--device", "cuda:98"], "cuda:98")])
def test_a_resumed_run_is_on_its_device_or_on_the_one_that_is_given(tmp_path, given, device):
    begin(SwarmPlan(RUN, tmp_path / "out", tmp_path / "out" / "saves", "cuda:99"))
    result = CliRunner().invoke(app, ["up", "--resume", str(tmp_path / "out"), *given])
    assert f"--device {device}: this machine has" in result.stderr


def test_resume_takes_no_other_folder_for_saves(tmp_path):
    result = CliRunner().invoke(app, ["up", "--resume", str(tmp_path), "--save-dir", "there"])
    assert result.exit_code == 1
    assert "--save-dir: --resume continues in the run's own folders" in result.stderr


def test_without_matplotlib_a_run_ends_with_a_word_instead_of_a_picture(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    (tmp_path / "logs").mkdir()
    output = io.StringIO()
    ending = Ending(3, "enough")
    assert wrap_up(RunFile(), tmp_path, Console(file=output, width=60), ending) == ending
    remedy = "no loss.png: matplotlib is not installed: pip install 'planaria[plots]'\n"
    assert remedy in output.getvalue()
    assert not (tmp_path / "loss.png").exists()
    assert json.loads((tmp_path / "summary.json").read_text())["stopped"] == "enough"


def test_events_are_sorted_and_half_written_ones_left_out(tmp_path):
    (tmp_path / "events-a.jsonl").write_text('{"time": 2.0, "kind": "b"}\n{"time": 9.0, "ki')
    (tmp_path / "events-b.jsonl").write_text('{"time": 1.0, "kind": "a"}\n')
    assert [event["kind"] for event in read_events(tmp_path)] == ["a", "b"]


async def test_steps_that_are_repeated_after_a_rollback_are_progress(tmp_path, monkeypatch):
    patience = swarm.PATIENCE * RUN.swarm.progress
    going = [
        {"time": 0.0, "kind": "committed", "step": 20},
        {"time": 1.0, "kind": "rolled back", "from": 20, "step": 10},
        {"time": 0.6 * patience, "kind": "committed", "step": 11},
        {"time": 1.2 * patience, "kind": "committed", "step": 12},
        {"time": 1.3 * patience, "kind": "stopped", "reason": "it was enough"},
    ]
    now = 0.0

    class Scripted(swarm._Swarm):
        def _start(self, slot):
            """Start no process."""

        async def _registry_address(self, stop):
            return "127.0.0.1:1"

        def _start_nodes(self):
            """Start no process."""

        def _read(self):
            nonlocal now
            event = going.pop(0)
            now = event["time"]
            self.story.hear(entry({"node": "a/0", **event}))

    monkeypatch.setattr(swarm, "time", SimpleNamespace(monotonic=lambda: now, time=lambda: now))
    run, screen = override(RUN, model__vocabulary=9), LiveScreen(Console(file=io.StringIO()), 40)
    plan = SwarmPlan(run, tmp_path, None, "cpu")
    scripted = Scripted(plan, [], screen, True, choose_losses(run))
    ending = await scripted.train(asyncio.get_running_loop().create_future())
    assert ending == Ending(1, "it was enough")
    await scripted.end()


async def test_who_was_to_be_killed_in_a_step_before_the_resumed_one_is_spared(tmp_path):
    """Its saves would be removed, too."""
    killed = []

    class Resumed(swarm._Swarm):
        def _kill_slots(self, kill):
            killed.append(kill)

    run, screen = override(RUN, model__vocabulary=9), LiveScreen(Console(file=io.StringIO()), 40)
    kills = [Kill(2, None, step) for step in (15, 20, 21, 22)]
    resumed = Resumed(
        SwarmPlan(run, tmp_path, None, "cpu"), kills, screen, True, choose_losses(run)
    )
    at_20 = {"time": 1.0, "kind": "resuming", "step": 20, "exact": True, "reason": ""}
    resumed.story.hear(entry({"node": "a/0", **at_20}))
    resumed._apply_due_kills()
    assert killed == [Kill(2, None, 21)]
    assert resumed.kills == [Kill(2, None, 22)]
    await resumed.end()


async def test_up_is_not_ended_by_what_it_was_started_to_ignore():
    """nohup ignores SIGHUP, and a script ignores SIGINT for processes in the background."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGHUP)}
    for number in before:
        signal.signal(number, signal.SIG_IGN)
    try:
        stop = stop_signals()
        for number in (*before, signal.SIGTERM):
            os.kill(os.getpid(), number)
        assert await stop == signal.SIGTERM
    finally:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
        for number, handler in before.items():
            signal.signal(number, handler)


CLEAN = {
    "steps": 40,
    "audit": {"expected": 640, "duplicates": 0, "missing": 0, "extra": 0},
    "replicas_identical": True,
}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"steps": 39}, "39 of 40 steps"),
        ({"audit": {**CLEAN["audit"], "missing": 2}}, "'missing': 2"),
        ({"replicas_identical": False}, "not identical"),
    ],
)
def test_a_finished_run_with_a_flaw_is_no_success(change, says):
    assert shortcomings(RUN, CLEAN) == []
    (problem,) = shortcomings(RUN, CLEAN | change)
    assert says in problem


@pytest.fixture
def data(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"line {n} of a text about worms" for n in range(3000)))
    path = tmp_path / "data" / "prose"
    corpus, _ = prepare(Recipe([str(text)], vocabulary=300, validation=0.3), path)
    return path, corpus


def test_a_resolved_run_says_all_that_a_node_needs(data):
    path, corpus = data
    run = resolve(loads(f'[data]\npath = "{path}"\n[model]\npreset = "mini"'))
    assert run.data.content == corpus.content
    assert (run.model.vocabulary, run.model.stages) == (corpus.vocabulary, 4)
    assert (run.training.lr, run.training.warmup) == (2e-3, 10)
    assert resolve(run) == run
    rules = registry_rules(run)
    assert (rules.stages, rules.data) == (4, corpus.content)
    assert rules.run == registry_rules(run).run
    assert rules.run != registry_rules(override(run, seed=1)).run


def test_a_run_keeps_its_name_when_a_later_planaria_has_more_keys():
    """Existing folders, saves and journals have these names. Their run files were resolved to
    codec none, policy checkfree and AdamW, which were the defaults."""
    whole = '[wire]\nactivations = "none"\ngradients = "none"\n'
    whole += '[recovery]\npolicy = "checkfree"\n[training]\noptimizer = "adamw"\n'
    assert run_id(loads(whole)) == "run-44136fa3"
    assert run_id(loads(dumps(loads(whole)))) == "run-44136fa3"
    text = f'name = "many"\nseed = 3\n[model]\nstages = 4\n[swarm]\nreplicas = 2\n{whole}'
    assert run_id(loads(text)) == run_id(loads(dumps(loads(text)))) == "many-9f074fb5"
    default = "lr = 1e-3\nwarmup = 20\n"  # defaults of `tiny`, as in resolved run files
    assert run_id(loads(whole + default)) == "run-44136fa3"


def test_data_that_is_not_the_runs_or_has_more_tokens_than_the_model_knows_is_refused(data):
    path, corpus = data
    with pytest.raises(CorpusError, match="is other data than the run's"):
        resolve(loads(f'[data]\npath = "{path}"\ncontent = "{"0" * 32}"'))
    fewer = corpus.vocabulary - 1
    with pytest.raises(CorpusError, match=f"1 more than the model's .model.vocabulary = {fewer}"):
        resolve(loads(f'[data]\npath = "{path}"\n[model]\nvocabulary = {fewer}'))
    more = resolve(loads(f'[data]\npath = "{path}"\n[model]\nvocabulary = {fewer + 2}'))
    assert more.model.vocabulary == fewer + 2


def test_data_may_be_elsewhere_when_the_run_file_says_the_vocabulary(tmp_path):
    elsewhere = f'[data]\npath = "{tmp_path / "none"}"\n'
    run = resolve(loads(elsewhere + "[model]\nvocabulary = 500"))
    assert (run.model.vocabulary, run.data.content) == (500, "")
    with pytest.raises(CorpusError, match="planaria data prepare"):
        resolve(loads(elsewhere))


def test_the_shipped_prose_is_for_runs_that_say_nothing_else(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = text_to_prepare(loads(""))
    assert text is not None
    assert list(text.glob("*.txt"))
    assert text_to_prepare(loads('[data]\npath = "mine"')) is None
    (tmp_path / "data/prose").mkdir(parents=True)
    assert text_to_prepare(loads("")) is None


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--replicas", "0"], "swarm.replicas"),
        (["--policy", "prayer"], "recovery.policy"),
        (["--stages", "2", "--kill", "7@3"], "no stage 7, choose 0 to 2"),
        (["--stages", "5"], "stages = 5 is more than layers = 4: choose fewer stages"),
        (["--stages", "200", "--layers", "200"], "are 201 nodes"),
        (
            ["--policy=checkfree+", "--layers=6", "--set=model.stages=[1, 2, 1, 2]"],
            "[1, 2, 1, 2] gives these different",
        ),
        (["--device", "cuda:99"], "--device cuda:99: this machine has "),
        (["no-such.toml"], "can't read the run file no-such.toml"),
    ],
)
def test_up_refuses_nonsense_before_it_starts_anything(
    data, tmp_path, monkeypatch, arguments, says
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(MachineSize, "this", lambda: MachineSize(2**36, 2))
    result = CliRunner().invoke(app, ["up", *arguments, "--out", "out"])
    assert result.exit_code == 1
    assert says in result.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["0", "-1", "many", "1.5", ""])
@pytest.mark.parametrize("command", ["up", "node --join 127.0.0.1:1"])
def test_a_number_of_seats_that_is_none_is_refused(tmp_path, monkeypatch, command, text):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, [*command.split(), f"--seats={text}"])
    assert result.exit_code == 2
    assert "use a number from 1, or auto" in result.output
    assert not list(tmp_path.iterdir())
    assert (parse_seats("3"), parse_seats("auto")) == (3, None)


def test_a_registry_that_goes_on_after_another_keeps_a_journal(data, tmp_path):
    path, _ = data
    file = tmp_path / "run.toml"
    file.write_text(f'[data]\npath = "{path}"')
    after = ["--after", str(tmp_path / "old.journal")]
    arguments = ["bootstrap", "--listen", "127.0.0.1:0", "--run", str(file), *after]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert "give this run a --journal of its own" in result.output
    result = CliRunner().invoke(app, [*arguments, "--journal", str(tmp_path / "new.journal")])
    assert result.exit_code == 1
    assert "can't read the journal" in result.output
