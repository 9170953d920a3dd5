"""Seconds to simulate 100,000 nodes for 100 steps, and events per second over those of simpy.

The reference of the latter is a pipeline with one node per stage, written as simpy processes with
priorities, links and the in-flight window only. Both must find the same time of a step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Generator
from typing import Any

import simpy
from simpy.resources.resource import PriorityRequest

from planaria.node.model.shape import model_config
from planaria.node.run_file import loads
from planaria_lab.bench.rows import keep
from planaria_lab.simulator.churn import Churn
from planaria_lab.simulator.clock import ON_WIRE
from planaria_lab.simulator.run import simulate_run
from planaria_lab.simulator.step import simulate_step
from planaria_lab.simulator.swarm import (
    Seconds,
    Swarm,
    frame_bytes,
    one_site,
    seconds_at,
    uniform,
)

STAGES, REPLICAS, STEPS = 19, 5000, 100
HOURLY = (0.0, 0.0005, 0.005)
REPEATS, MICROBATCHES = 5, 512
GOAL_SECONDS, GOAL_RATIO = 60.0, 1.0


def large() -> Swarm:
    run = loads(f"""
steps = {STEPS}
[model]
preset = "large"
stages = {STAGES}
layers = {STAGES}
[training]
optimizer = "adamw"
batch = {REPLICAS * 16}
microbatch = 4
[recovery]
policy = "checkpoint"
""")
    config = model_config(run.model, 50_257)
    seconds = {stage: seconds_at(run, config, stage, 5e13, 1e12) for stage in range(STAGES + 1)}
    return uniform(run, config, one_site(40, 1000), seconds, REPLICAS)


def lane() -> Swarm:
    run = loads(f"""
[model]
preset = "tiny"
stages = 6
layers = 6
[training]
optimizer = "adamw"
batch = {2 * MICROBATCHES}
in_flight = 7
[recovery]
policy = "checkpoint"
""")
    config = model_config(run.model, 512)
    seconds = {0: Seconds(0.001, 0.002, head=0.005)}
    seconds |= {stage: Seconds(0.003 + stage / 3e3, 0.007) for stage in range(1, 7)}
    return uniform(run, config, one_site(10, 100), seconds)


def by_simpy(swarm: Swarm) -> tuple[float, int]:
    """Simulate one step with simpy; return its seconds until all microbatches are back at stage 0,
    and the number of events. The swarm has one node per stage. The traffic of its policy and
    updates are left out."""
    return _Pipeline(swarm).run()


class _Counted(simpy.Environment):
    events = 0

    def step(self) -> None:
        self.events += 1
        super().step()


class _Pipeline:
    def __init__(self, swarm: Swarm) -> None:
        self.swarm, self.environment = swarm, _Counted()
        self.seconds = {group.stage: group.seconds for group in swarm.groups}
        count = swarm.config.stages + 1
        self.threads = [simpy.PriorityResource(self.environment) for _ in range(count)]
        self.wires: dict[tuple[int, int], simpy.Resource] = {}
        self.window = simpy.Container(self.environment, init=swarm.in_flight)

    def run(self) -> tuple[float, int]:
        whole = self.environment.process(self.source())
        self.environment.run(whole)
        return float(self.environment.now), self.environment.events

    def source(self) -> Generator[Any, Any, None]:
        under_way = []
        for _ in range(self.swarm.run.training.microbatches):
            yield self.window.get(1)
            under_way.append(self.environment.process(self.microbatch()))
        yield self.environment.all_of(under_way)

    def microbatch(self) -> Generator[Any, Any, None]:
        body = range(1, self.swarm.config.stages + 1)
        yield from self.compute(0, 2, self.seconds[0].forward)
        for stage in body:
            yield from self.cross(stage - 1, stage, "activation")
            yield from self.compute(stage, 2, self.seconds[stage].forward)
        yield from self.cross(body[-1], 0, "activation")
        yield from self.compute(0, 1, self.seconds[0].head)
        for stage in reversed(body):
            yield from self.cross((stage + 1) % len(self.threads), stage, "gradient")
            yield from self.compute(stage, 1, self.seconds[stage].backward)
        yield from self.cross(1, 0, "gradient")
        yield from self.compute(0, 1, self.seconds[0].backward)
        yield self.window.put(1)

    def compute(self, stage: int, priority: int, seconds: float) -> Generator[Any, Any, None]:
        with PriorityRequest(self.threads[stage], priority) as turn:
            yield turn
            yield self.environment.timeout(seconds)

    def cross(self, a: int, b: int, kind: str) -> Generator[Any, Any, None]:
        link = self.swarm.link(a, b)
        wire = self.wires.setdefault((a, b), simpy.PriorityResource(self.environment))
        size = frame_bytes(self.swarm.run, self.swarm.config, kind)
        with PriorityRequest(wire, 0 if kind == "gradient" else 1) as turn:
            yield turn
            yield self.environment.timeout(size * ON_WIRE * 8 / (link.mbps * 1e6))
        yield self.environment.timeout(link.delay_ms / 1e3)


def main() -> None:
    swarm = large()
    for hourly in HOURLY:
        began = time.perf_counter()
        outcome = simulate_run(swarm, Churn(hourly=hourly))
        took = time.perf_counter() - began
        print(
            f"{sum(swarm.counts):,} nodes, {outcome.steps} steps, {hourly:.2%} of nodes lost an "
            f"hour ({sum(loss.nodes for loss in outcome.losses)} lost, {outcome.shapes} steps "
            f"simulated): {took:.1f} s; goal {GOAL_SECONDS:.0f}"
        )
        keep("simulator", hourly=hourly, nodes=sum(swarm.counts), seconds=took)
    single = lane()
    ours, theirs = [], []
    for _ in range(REPEATS):
        began = time.perf_counter()
        step = simulate_step(single, steps=2)
        ours.append(step.events / (time.perf_counter() - began))
        began = time.perf_counter()
        seconds, events = by_simpy(single)
        theirs.append(events / (time.perf_counter() - began))
    if abs(seconds - step.pipeline) > 1e-6:
        raise AssertionError(f"simpy: {seconds} s, ours: {step.pipeline} s")
    a, b = statistics.median(ours), statistics.median(theirs)
    print(f"one lane of 7 stages, {MICROBATCHES} microbatches, {seconds:.3f} s a step by both")
    print(f"events a second: {a:,.0f}; simpy {b:,.0f}; ratio {a / b:.2f} (goal {GOAL_RATIO:.2f})")
    keep("simulator", events_per_second={"ours": ours, "simpy": theirs})


if __name__ == "__main__":
    main()
