"""Seconds of a step of twelve nodes on home links, by a plan, its simulation, and a live run.

`planaria plan` plans the small run below on twelve machines at home. Between two of them are 20 to
50 ms one way, and each has an uplink of 1.5 to 5 Mbit/s, drawn from a seed. With faster uplinks,
computing on two cores would take longer than sending. The proposed plan is then simulated, and
trained live: a registry and a process for each node, each in a network namespace of its own, behind
emulated links and on an emulated processor (emulation). It needs root, and takes a minute and a
half for each set of homes.

    python -m planaria_lab.bench.planned [SEED ..]      # each a set of twelve homes
"""

from __future__ import annotations

import asyncio
import shutil
import statistics
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import combinations
from pathlib import Path
from random import Random

from planaria.node.data.prepare import prepare
from planaria.node.data.recipe import Recipe
from planaria.node.launch.resolve import SHIPPED, resolve
from planaria.node.local.plan import SwarmPlan
from planaria.node.model.shape import model_config
from planaria.node.report.event_log import LineReader
from planaria.node.run_file import loads, override
from planaria_lab.bench.rows import keep
from planaria_lab.emulation.emulation import EmulationError, emulate
from planaria_lab.emulation.links import Link, Network
from planaria_lab.emulation.live_swarm import MeasuredSwarm, measure, train
from planaria_lab.emulation.paced_node import Pace, run_paced
from planaria_lab.planning.planner import Candidate, Machine, Question, answer, with_codecs
from planaria_lab.simulator.step import simulate_step, typical_seconds
from planaria_lab.simulator.swarm import Swarm, sites

OUT = Path("out/planned")
NODES = 12
STEPS = 24
VOCABULARY = 512
DELAYS = (10.0, 25.0)  # ms from a home to the middle of the network
UPLINKS = (1.5, 5.0)  # Mbit/s
DOWN = 20.0  # Mbit/s between two homes, if the uplink allows that
FLOPS = 1e9  # sustained FLOP/s of a node
SIMULATED = 6  # steps
RUN = f"""
name = "homes"
steps = {STEPS}
[model]
preset = "tiny"
stages = 3
layers = 3
vocabulary = {VOCABULARY}
[data]
path = "{OUT}/data"
[training]
optimizer = "adamw"
batch = 96
validation_microbatches = 0
"""
FREE = ("activations", "gradients", "averaging")


def homes(seed: int) -> Network:
    """Draw twelve sites. The delay between two is the sum of their delays to the middle."""
    drawn = Random(seed)
    away = {f"home {number}": drawn.uniform(*DELAYS) for number in range(1, NODES + 1)}
    uplinks = {name: drawn.uniform(*UPLINKS) for name in away}
    links = [Link(a, b, away[a] + away[b], DOWN) for a, b in combinations(away, 2)]
    return sites(links, uplinks)


def planned(network: Network) -> tuple[Candidate, Candidate | None]:
    """Return the proposed plan, and the plan with the default codecs."""
    run = loads(RUN)
    machines = tuple(Machine(name, name, FLOPS, memory=4e9, shared=True) for name in network.sites)
    tokens = float(STEPS * run.training.batch * model_config(run.model, VOCABULARY).context)
    question, wider = with_codecs(Question(run, VOCABULARY, machines, network, tokens), FREE)
    return answer(question).best, wider


def placed(plan: Candidate) -> dict[str, str]:
    """Map each slot of `planaria up` to its home in the plan. The registry is with slot 0.0."""
    slots = {
        f"{stage}.{number}": machine.site
        for stage, machines in enumerate(plan.nodes)
        for number, machine in enumerate(machines)
    }
    return {"registry": plan.nodes[0][0].site, **slots}


def pace(swarm: Swarm) -> Pace:
    """Return the pace of each node by the plan; all nodes are alike."""
    seconds = {min(group.stage, 1): group.seconds for group in swarm.groups}
    return Pace(seconds[1].forward, seconds[1].backward, seconds[0].head)


def live(plan: Candidate, out: Path) -> MeasuredSwarm:
    """Train the planned run with the planned nodes and links. Raises LiveError, EmulationError."""
    shutil.rmtree(out, ignore_errors=True)
    saves = str((out / "checkpoints").absolute())
    run = resolve(override(plan.run, recovery__checkpoint__dir=saves))
    network = plan.swarm.network
    with emulate(Network(placed(plan), network.links, network.uplinks)) as links:
        work = partial(run_paced, pace(plan.swarm))
        swarm = SwarmPlan(run, out, None, "cpu", links.homes, work=work)
        with links.inside("registry"):
            carried = asyncio.run(train(swarm, [], links, lambda step: None))
    return measure(out, [], carried)


def computing(plan: Candidate, out: Path) -> float:
    """Return the seconds that all nodes' compute threads took, over those of the plan. It is above
    1, since the nodes share this machine's cores."""
    took = 0.0
    for path in (out / "logs").glob("events-node-*"):
        walls = [line for line in LineReader(path).lines() if line["kind"] == "wall"]
        took += walls[-1]["compute"]  # each line has the total so far
    each = pace(plan.swarm)
    microbatch = each.head + plan.swarm.config.stages * (each.forward + each.backward)
    return took / (plan.run.steps * plan.run.training.microbatches * microbatch)


def compare(seed: int) -> Iterator[str]:
    plan, wider = planned(homes(seed))
    wire, training = plan.run.wire, plan.run.training
    simulated = typical_seconds(plan.swarm, SIMULATED)
    yield (
        f"homes {seed}: {plan.shape}, {plan.policy}, {training.microbatches} microbatches of "
        f"{training.microbatch}, {plan.swarm.in_flight} in flight, {wire.activations} / "
        f"{wire.gradients} / {wire.averaging}"
    )
    out = OUT / str(seed)
    measured = live(plan, out)
    step = statistics.median(measured.step_seconds)
    figures = {
        "shape": plan.shape,
        "policy": plan.policy,
        "planned": plan.estimate.step,
        "wider": wider and wider.estimate.step,
        "simulated": simulated,
        "live": step,
        "quartiles": statistics.quantiles(measured.step_seconds, n=4)[::2],
        "bytes": simulate_step(plan.swarm, SIMULATED).bytes,
        "live_bytes": measured.step_bytes,
        "computing": computing(plan, out),
        "late": measured.late,
        "dropped": measured.dropped,
        "steps": len(measured.step_seconds),
    }
    keep("planned", seed=seed, **figures)
    yield (
        f"a step: planned {plan.estimate.step:.3f} s ({plan.estimate.step / step - 1:+.1%}), "
        f"simulated {simulated:.3f} s ({simulated / step - 1:+.1%}), "
        f"live {step:.3f} s; {plan.tokens_per_second:,.0f} tokens/s planned, "
        f"{plan.tokens_per_second * plan.estimate.step / step:,.0f} live"
    )


def main(seeds: Sequence[int] = (0, 1)) -> None:
    data = Path(loads(RUN).data.path)
    if not data.exists():
        prepare(Recipe([str(SHIPPED)], vocabulary=VOCABULARY), data)
    try:
        for seed in seeds:
            for line in compare(seed):
                print(line, flush=True)
    except EmulationError as error:
        print(error)


if __name__ == "__main__":
    main([int(text) for text in sys.argv[1:]] or (0, 1))
