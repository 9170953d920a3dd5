"""Tests of `planaria plan`: what it reads, refuses, prints and writes."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from planaria.node import cli
from planaria.node.launch.resolve import registry_rules
from planaria.node.local.loss_schedule import TraceRow, parse_kill
from planaria.node.run_file import dumps, load, loads
from planaria.recovery.policy import POLICIES
from planaria_lab.planning.machines import Hardware, alike, parse_kinds, probed
from planaria_lab.planning.plan import curves, figures
from planaria_lab.planning.planner import Machine, PlanError, Question
from planaria_lab.simulator.swarm import one_site

RUN = """
name = "mine"
steps = 300
[model]
preset = "tiny"
vocabulary = 512
[training]
batch = 16
[saves]
every = 7
"""
NODES = ("--tflops", "0.05", "--memory", "1", "--price", "0.5")


def invoke(tmp_path: Path, *arguments: str, run: str = RUN) -> tuple[int, str]:
    path = tmp_path / "run.toml"
    path.write_text(run)
    words = [word.replace("RUN", str(path)) for word in arguments]
    result = CliRunner().invoke(cli.app, ["plan", *words], env={"COLUMNS": "220"})
    return result.exit_code, result.output


def data(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    status, output = invoke(tmp_path, *arguments, "--json")
    assert status == 0, output
    content: dict[str, Any] = json.loads(output)
    return content


def test_a_plan_is_printed_and_written_as_a_run_file(tmp_path: Path) -> None:
    out = tmp_path / "plan.toml"
    sites = ("--site", "Iowa:7", "--site", "Oregon:3")
    status, output = invoke(tmp_path, "RUN", *NODES, *sites, "--hourly", "0.1", "--out", str(out))
    assert status == 0, output
    assert re.search(r"a step +│ [\d.]+ s \(simulated: [\d.]+ s\)", output)
    assert "Rejected plans" in output
    assert re.search(r"redundant .* instead of", output)
    planned = load(out)
    assert (planned.name, planned.saves.every) == ("mine", 7)  # keys that aren't planned stay
    assert planned.training.batch == 16
    assert planned.steps == 300
    assert loads(dumps(planned)) == planned
    rules = registry_rules(planned)
    assert rules.stages == planned.model.stages
    assert parse_kill(f"{planned.model.stages}@2", planned).stage == planned.model.stages


def test_json_has_the_plan_and_what_loses(tmp_path: Path) -> None:
    content = data(tmp_path, "RUN", *NODES, "--nodes", "6", "--hourly", "0.2")
    plan = content["plan"]
    assert sum(plan["replicas"]) <= 6
    assert len(plan["memory"]) == len(plan["nodes"]) == plan["stages"]
    assert math.fsum(plan["spent"].values()) == pytest.approx(plan["seconds"])
    price = sum(plan["replicas"]) * 0.5
    assert plan["money"] == pytest.approx(plan["seconds"] / 3600 * price)
    assert {other["policy"] for other in content["others"]} > {"redundant"}
    assert all(other["why"] for other in content["others"])


HOMES = ("--nodes", "8", "--delay", "35", "--mbps", "20", "--uplink", "2")


def test_codecs_that_the_run_file_leaves_open_are_chosen_with_the_reason(tmp_path: Path) -> None:
    out = tmp_path / "plan.toml"
    content = data(tmp_path, "RUN", *NODES, *HOMES, "--out", str(out))
    chosen = content["plan"]["wire"]
    assert (chosen["activations"], chosen["gradients"]) == ("int8", "int4")
    assert content["wider"]["wire"] == {
        "activations": "bf16",
        "gradients": "bf16",
        "averaging": "none",
    }
    assert content["plan"]["step_seconds"] < content["wider"]["step_seconds"]
    assert content["narrow"] is None  # no narrower codec would save time
    assert {name: getattr(load(out).wire, name) for name in chosen} == chosen
    status, output = invoke(tmp_path, "RUN", *NODES, *HOMES)
    assert status == 0
    assert re.search(r"on the wire .*showed no cost in learning.*With activations", output, re.S)


def test_codecs_of_the_run_file_are_kept(tmp_path: Path) -> None:
    wire = '[wire]\nactivations = "none"\ngradients = "bf16"\naveraging = "none"\n'
    status, output = invoke(tmp_path, "RUN", *NODES, *HOMES, "--json", run=RUN + wire)
    assert status == 0, output
    content = json.loads(output)
    assert content["plan"]["wire"]["activations"] == "none"
    assert content["wider"] is None
    assert content["narrow"]["wire"]["activations"] == "int8"  # reported, not chosen


def test_without_sites_each_node_with_an_uplink_is_at_home(tmp_path: Path) -> None:
    hardware = NOTHING._replace(nodes=4, tflops=0.05, memory=1.0)
    machines, network = alike(hardware, [], None, 35.0, 20.0, 2.0)
    assert len({machine.site for machine in machines}) == 4
    assert set(network.uplinks.values()) == {2.0}
    assert network.between(machines[0].site, machines[3].site)[2:4] == (35.0, 20.0)
    slow = data(tmp_path, "RUN", *NODES, *HOMES)["plan"]["tokens_per_second"]
    assert slow < data(tmp_path, "RUN", *NODES, *HOMES[:-2])["plan"]["tokens_per_second"]


def test_a_preset_and_a_kind_are_enough(tmp_path: Path) -> None:
    content = data(
        tmp_path, "--preset", "small", "--nodes", "4", "--kind", "t4", "--tokens", "1e9",
        "--policy", "snapshot", "--policy", "checkpoint",
    )  # fmt: skip
    plan = content["plan"]
    assert plan["microbatch"] * plan["microbatches"] == 512
    assert plan["steps"] == math.ceil(1e9 / 2**18)
    assert {plan["policy"], *(other["policy"] for other in content["others"])} == {
        "snapshot",
        "checkpoint",
    }


PROBE: dict[str, Any] = {
    "nodes": [
        {"node": f"n{i}", "stage": 0, "device": "cpu", "memory": 2e9, "tflops": 0.01 * (1 + i)}
        for i in range(4)
    ],
    "links": [
        {"a": "n0", "b": "n2", "rtt_ms": 2.0, "mbps": 900.0},
        {"a": "n1", "b": "n3", "rtt_ms": 4.0, "mbps": 800.0},
        {"a": "n0", "b": "n1", "rtt_ms": 80.0, "mbps": 70.0},
        {"a": "n1", "b": "n0", "rtt_ms": 79.0, "mbps": 50.0},
    ],
}
NOTHING = Hardware(None, (), None, None, None, None, 0.25, cpu=False)


def test_a_probe_says_what_nodes_and_links_are(tmp_path: Path) -> None:
    path = tmp_path / "probe.json"
    path.write_text(json.dumps(PROBE))
    machines, network = probed(path, NOTHING)
    assert [machine.name for machine in machines] == ["n0", "n2", "n1", "n3"]  # neighbours are near
    assert machines[1].flops == pytest.approx(0.03e12)
    assert (machines[0].memory, machines[0].price, machines[0].shared) == (2e9, 0.25, True)
    assert network.between("n0", "n2")[2:4] == (1.0, 900.0)
    assert network.between("n2", "n3")[2:4] == (40.0, 50.0)  # not measured: the worst link's
    content = data(tmp_path, "RUN", "--probe", str(path))
    assert content["plan"]["nodes"] == [["n1"], ["n3"], ["n2"]]  # without the slowest


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nodes": PROBE["nodes"][:1]}, "has 1 nodes and 3 links: planning needs"),
        ({"links": []}, "has 4 nodes and 0 links"),
        ({"links": [{"a": "n0", "b": "n1", "rtt_ms": 8}]}, "KeyError('mbps')"),
        (
            {"links": [{"a": "n0", "b": "n1", "rtt_ms": 8, "mbps": 0}]},
            "8 ms and 0 Mbit/s between n0 and n1 are impossible for a link",
        ),
    ],
)
def test_a_bad_probe_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "probe.json"
    path.write_text(json.dumps(PROBE | change))
    with pytest.raises(PlanError, match=re.escape(message)):
        probed(path, NOTHING)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*NODES, "--nodes", "4"), "give exactly one of these: a run"),
        (("--preset", "huge", *NODES, "--nodes", "4"), "--preset huge: unknown; choose from large"),
        (("--preset", "tiny", *NODES, "--nodes", "4"), "give --tokens"),
        (("RUN", *NODES), "give --nodes, or --site NAME:NODES"),
        (("RUN", "--nodes", "4"), "give --kind, or --tflops and --memory"),
        (("RUN", "--nodes", "4", "--kind", "abacus"), "--kind abacus is unknown: choose from t4"),
        (("RUN", *NODES, "--site", "Iowa:x"), "--site Iowa:x: write NAME or NAME:NODES"),
        (("RUN", *NODES, "--site", "Iowa:3", "--nodes", "9"), "--nodes 9 contradicts the 3"),
        (("RUN", *NODES, "--site", "Iowa", "--site", "Mars", "--nodes", "4"), "no link between"),
        (("RUN", *NODES, "--nodes", "4", "--policy", "hope"), "--policy hope: unknown; choose"),
        (("RUN", *NODES, "--nodes", "4", "--hourly", "10"), "10 % is 0.1"),
        (("RUN", *NODES, "--nodes", "4", "--mbps", "0"), "a delay of 40 ms and 0 Mbit/s are impos"),
        (("RUN", *NODES, "--nodes", "4", "--delay", "-5"), "-5 ms and 100 Mbit/s are impossible"),
        (
            ("RUN", *NODES, "--nodes", "4", "--deadline", "0.0001"),
            "no plan meets the deadline and the budget: the nearest",
        ),
        (("RUN", *NODES, "--nodes", "4", "--probe", "none.json"), "can't read the probe none.json"),
        (("RUN", "--kinds", "rtx4090 x2, abacus"), "--kind abacus is unknown: choose from t4"),
        (("RUN", "--kinds", "rtx4090 2x"), "'rtx4090 2x' is no kind: write KIND[:GB][ xN], .."),
        (("RUN", "--kinds", "rtx4090 x0"), "'rtx4090 x0' is no kind"),
        (("RUN", "--kinds", "rtx4090, "), "'' is no kind"),
        (("RUN", "--kinds", "t4 x2, m2", "--nodes", "4"), "--nodes 4 contradicts the 3 machines"),
        (("RUN", *NODES, "--nodes", "4", "--base", "nf4"), "give --lora RANK, too"),
        (("RUN", *NODES, "--nodes", "4", "--lora", "4"), "training.lora trains adapters of a trai"),
        (("--from", "MODEL", *NODES, "--nodes", "4", "--lora", "0"), "training.lora.rank: Input"),
        (
            ("--from", "MODEL", *NODES, "--nodes", "4", "--lora", "4", "--base", "int3"),
            "training.lora.base: Input should be 'nf4', 'int8' or 'bf16'",
        ),
        (
            ("--from", "MODEL", *NODES, "--nodes", "6", "--lora", "4", "--policy", "checkfree+"),
            "recovery.policy = checkfree+ swaps stages, but with training.lora",
        ),
        (("--from", "none/", *NODES, "--nodes", "4"), "there is no such folder"),
        (("--from", "RUN", *NODES, "--nodes", "4"), "give a model's folder, or the config.json in"),
        (("--from", "GPT2", *NODES, "--nodes", "4"), "own code (model_type = gpt2); suppo"),
        (("--from", "MODEL", "--kinds", "t4:0.1 x2"), "nothing fits on 2 nodes."),
    ],
)
def test_what_cannot_be_planned_is_refused(
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    folder = model(tmp_path, **({"model_type": "gpt2"} if "GPT2" in arguments else {}))
    words = [folder if word in ("MODEL", "GPT2") else word for word in arguments]
    status, output = invoke(tmp_path, *words)
    assert status == 1
    assert message in " ".join(output.split())


# --- a model's config, and machines of several kinds

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 9,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
    "max_position_embeddings": 1024,
    "dtype": "bfloat16",
}
FRIENDS = ("--kinds", "rtx3060:12 x2, RTX4090, m2:16", "--mbps", "1000")
LORA = ("--lora", "8", "--base", "nf4", "--context", "256")


def model(tmp_path: Path, **changes: Any) -> str:
    folder = tmp_path / "model"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return str(folder)


def test_a_config_alone_is_planned(tmp_path: Path) -> None:
    folder, out = model(tmp_path), tmp_path / "plan.toml"
    content = data(tmp_path, "--from", folder, *LORA, *FRIENDS, "--out", str(out))
    plan = content["plan"]
    assert sum(plan["layers"]) == 9
    assert content == data(tmp_path, "--from", f"{folder}/config.json", *LORA, *FRIENDS)
    run = load(out)
    assert (run.model.origin, run.model.context, run.model.dim) == (folder, 256, 512)
    lora = run.training.lora
    assert lora is not None
    assert (lora.rank, lora.base) == (8, "nf4")
    written = [*run.model.stages] if isinstance(run.model.stages, tuple) else run.model.body_stages
    assert written in (plan["layers"], len(plan["layers"]))
    status, output = invoke(tmp_path, "--from", folder, *LORA, *FRIENDS)
    assert status == 0, output
    assert re.search(r"│ +0 │ +ends │ node \d \(\w+\) +│ +[\d.]+ of [\d.]+ GB │", output)
    assert "of 10.80 GB" in output


def test_a_run_file_with_adapters_is_planned_like_the_options(tmp_path: Path) -> None:
    run = f"""
        [model]
        from = "{model(tmp_path)}"
        context = 256
        [training]
        batch = 16
        microbatch = 1
        precision = "bf16"
        [training.lora]
        rank = 8
        base = "nf4"
    """
    status, output = invoke(tmp_path, "RUN", *FRIENDS, "--json", run=run)
    assert status == 0, output
    assert json.loads(output) == data(tmp_path, "--from", model(tmp_path), *LORA, *FRIENDS)


def test_a_base_of_fewer_bits_takes_less(tmp_path: Path) -> None:
    def device(*options: str, dtype: str = "bfloat16") -> float:
        folder, few = model(tmp_path, dtype=dtype), ("--kind", "rtx3060 x3", "--policy", "snapshot")
        plan = data(tmp_path, "--from", folder, "--context", "64", *few, *options)["plan"]
        size: float = plan["memory"][1]["device"]
        return size

    sizes = [device("--lora", "8", "--base", base) for base in ("nf4", "int8", "bf16")]
    assert sizes == sorted(sizes)
    whole = device("--lora", "8", dtype="float32")
    assert sizes[-1] < whole < device()
    assert device("--lora", "8") < whole  # bf16 weights are kept in bf16


def test_two_friends_are_enough_for_adapters(tmp_path: Path) -> None:
    """Adapters aren't guessed from other stages. For all weights, a guess needs three nodes."""
    few = ("--kinds", "rtx3060, rtx4090", "--policy", "checkfree")
    plan = data(tmp_path, "--from", model(tmp_path), *LORA, *few)["plan"]
    assert (plan["replicas"], plan["layers"]) == ([1, 1], [9])
    status, output = invoke(tmp_path, "--from", model(tmp_path), *few)
    assert (status, "allow no plan" in output) == (1, True)


def test_kinds_are_machines_in_their_order() -> None:
    text = "rtx3060:10 x2, m2:16"
    machines, _ = alike(NOTHING._replace(kinds=parse_kinds(text)), [], None, 1.0, 1.0, None)
    assert [m.name for m in machines] == ["node 1 (rtx3060)", "node 2 (rtx3060)", "node 3 (m2)"]
    assert [m.memory for m in machines] == [1e10, 1e10, 1.2e10]
    assert [m.shared for m in machines] == [False, False, True]
    assert machines[0].flops == pytest.approx(0.4 * 25.5e12)
    sited, _ = alike(
        NOTHING._replace(kinds=parse_kinds(text)), ["Iowa:2", "Oregon:1"], None, 1.0, 1.0, None
    )
    assert [machine.site for machine in sited] == ["Iowa", "Iowa", "Oregon"]


@pytest.mark.parametrize(
    ("nodes", "sites"),
    [
        (None, ["Iowa:2", "Oregon:1", "Iowa:3"]),
        (6, ["Iowa:2", "Oregon:1", "Iowa"]),
        (6, ["Iowa", "Oregon:1", "Iowa"]),
    ],
)
def test_nodes_of_a_site_that_is_named_twice_add_up(nodes: int | None, sites: list[str]) -> None:
    hardware = NOTHING._replace(nodes=nodes, kinds=parse_kinds("a100"))
    machines, _ = alike(hardware, sites, None, 1.0, 1.0, None)
    assert [machine.site for machine in machines] == [*["Iowa"] * 5, "Oregon"]


# --- traces


def trace(tmp_path: Path) -> Path:
    rows = [f"0,add,m{i}" for i in range(6)]
    rows += ["60000,remove,m3", "100000,add,m6", "200000,remove,m0", "250000,add,m7"]
    path = tmp_path / "spot.csv"
    path.write_text("\n".join([*rows, "400000,remove,m1"]) + "\n")
    return path


def test_figures_of_a_trace() -> None:
    rows = [
        TraceRow(0.0, True, "a"),
        TraceRow(0.0, True, "b"),
        TraceRow(1800.0, False, "a"),
        TraceRow(3600.0, True, "c"),
    ]
    nodes, hourly = figures(rows)
    assert nodes == pytest.approx(1.5)
    assert hourly == pytest.approx(-math.expm1(-1 / 1.5))


def test_a_trace_is_replayed_for_each_policy(tmp_path: Path) -> None:
    path = str(trace(tmp_path))
    words = ("RUN", *NODES, "--trace", path, "--policy", "checkfree", "--policy", "redundant")
    content = data(tmp_path, *words)
    assert set(content["trace"]) == {"checkfree", "redundant"}
    for replay in content["trace"].values():
        assert replay["seconds"] == pytest.approx(400.0)
        assert replay["steps"] > 0
        assert replay["losses"] == 2  # the third comes as the trace ends
        assert replay["goodput"] == pytest.approx(replay["steps"] / 400.0)
        assert 0 < replay["training"] < 1
        assert 0 < replay["node_hours"] <= 6 * 400 / 3600
    status, output = invoke(tmp_path, *words)
    assert status == 0
    assert "On the trace, simulated" in output
    assert "stopped after" not in output, "the trace's end is no failure"


def test_a_run_file_is_refused_as_by_other_commands(tmp_path: Path) -> None:
    status, output = invoke(tmp_path, "RUN", *NODES, run="[model]\ndim = 1_000_000_000\n")
    assert status == 1
    assert "is not a valid run file: model.dim: Input should be less" in " ".join(output.split())


# --- the picture


def test_curves_rise_with_the_rate(tmp_path: Path) -> None:
    machines = tuple(Machine(f"n{i}", "anywhere", 5e10, 1e9, price=1.0) for i in range(5))
    asked = Question(loads(RUN), 512, machines, one_site(40, 100), 1e7, hourly=0.07)
    drawn = curves(asked)
    assert set(drawn) == {*POLICIES}
    for points in drawn.values():
        assert 0.07 in [rate for rate, _, _ in points]
        assert points == sorted(points)
        for column in (1, 2):
            values = [point[column] for point in points]
            assert values == sorted(values)
    status, output = invoke(
        tmp_path, "RUN", *NODES, "--nodes", "3", "--plot", str(tmp_path / "plan.png")
    )
    assert status == 0, output
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def planned(tmp_path: Path, *arguments: str) -> str:
    path = tmp_path / "run.toml"
    path.write_text('[model]\npreset = "small"\nvocabulary = 32000\n')
    command = ["plan", str(path), "--kind", "t4", "--policy", "snapshot", *arguments]
    result = CliRunner().invoke(cli.app, command, env={"COLUMNS": "220"})
    assert result.exit_code == 0, result.output
    return result.output


def test_a_plan_says_what_a_notice_is_good_for(tmp_path: Path) -> None:
    output = planned(tmp_path, "--nodes", "3", "--mbps", "10000", "--delay", "1")
    assert "handover in 120 s" in output
    assert "exact: stages 0-" in output


def test_a_slow_uplink_delays_handovers(tmp_path: Path) -> None:
    def stages(*arguments: str) -> list[dict[str, Any]]:
        output = planned(tmp_path, "--site", "Iowa:2", "--site", "Oregon:2", *arguments, "--json")
        handovers: list[dict[str, Any]] = json.loads(output)["plan"]["handover"]
        return handovers

    slow = stages("--uplink", "10")
    for stage in slow:
        assert stage["state"]["bytes"] == (2 if stage["stage"] else 3) * stage["weights"]["bytes"]
        assert stage["state"]["seconds"] > stage["state"]["bytes"] * 8 / 10e6
        assert "exact" not in stage["possible"].values()
    assert any("exact" in stage["possible"].values() for stage in stages())
