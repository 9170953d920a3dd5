"""What a loss, a rebuild and a joiner take, in closed form: the rounds of messages that
docs/protocol.md describes, and the bytes that are fetched.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from planaria.bootstrap.rules import MembershipRules
from planaria.recovery.facts import INEXACT
from planaria.recovery.relearning import pass_count, updates_per_check
from planaria_lab.emulation.links import Link
from planaria_lab.simulator.churn import Churn
from planaria_lab.simulator.swarm import (
    Group,
    Seconds,
    Swarm,
    fetched_bytes,
    frame_bytes,
    kept_bytes,
    relearned_at_a_time,
)

_REGISTRY: Final = MembershipRules("simulated", stages=1)
JOINING: Final = 4
"""Rounds until a node has joined: TCP's, HTTP/2's, the question what is trained, and to join."""
DIALLING: Final = 2
"""Rounds until a link is up: to connect, and the handshake."""
INITIAL_WINDOW: Final = 10 * 1448
"""Bytes that TCP sends on a new connection before it hears of them (RFC 6928)."""
NEIGHBOURS: Final = ("checkfree", "checkfree+", "interpolate", "replica")
"""Methods that fetch over links which the next step's frames take too."""
GUESSED: Final = 1.5
"""Residual error of most guesses, at most: as if the stage passed on what it gets
(lab/results/relearning-rates)."""
FAR_OFF: Final = 2
"""The stage whose guess is ten times as far off, most of it made of stage 1."""


def delay(swarm: Swarm, a: int, b: int) -> float:
    """Seconds one way between the first nodes of two stages."""
    return swarm.link(a, b).delay_ms / 1e3


def to_registry(swarm: Swarm, stage: int) -> float:
    """Seconds one way between the first nodes of a stage and the registry."""
    site = swarm.registry or swarm.site_of(0)
    return swarm.network.between(swarm.site_of(stage), site).delay_ms / 1e3


def farthest(swarm: Swarm) -> float:
    """Seconds one way between the driver and the node that is farthest from it."""
    driver = swarm.site_of(0)
    far = [swarm.network.between(driver, group.site).delay_ms for group in swarm.groups]
    return max(far) / 1e3


def noticed(swarm: Swarm, churn: Churn, stage: int) -> float:
    """From a loss until the driver has a view without the node: its connection to the registry is
    reset and nobody is there, or it is silent and its lease runs out. One that was given notice
    says that it leaves."""
    if churn.notice:
        wait = 0.0
    elif churn.silent:
        times = swarm.run.swarm
        wait = min(times.silence + _REGISTRY.probe_timeout, times.lease)
    else:
        wait = _REGISTRY.reconnect
    return wait + to_registry(swarm, stage) + to_registry(swarm, 0)


def notified(swarm: Swarm, churn: Churn, stage: int) -> float:
    """From a replica's loss until all have the plan of a step that goes on without it: the driver's
    link to it is silent, or the registry's view is without it."""
    silent = delay(swarm, 0, stage) + swarm.run.swarm.silence
    return min(silent, noticed(swarm, churn, stage)) + farthest(swarm)


def sending_again(swarm: Swarm, stage: int, microbatches: float) -> float:
    """Until a node has what the stages beside it had sent a lost replica for so many microbatches:
    activations by the one, gradients by the other, at the same time."""
    ring = swarm.config.stages + 1
    seconds = 0.0
    for direction, kind in ((-1, "activation"), (1, "gradient")):
        link = swarm.link((stage + direction) % ring, stage)
        size = frame_bytes(swarm.run, swarm.config, kind)
        seconds = max(seconds, link.delay_ms / 1e3 + microbatches * size * 8 / (link.mbps * 1e6))
    return seconds


def gathering(swarm: Swarm) -> float:
    """A question of the driver's to all nodes, and their answers."""
    return 2 * farthest(swarm) + 2 * sum(swarm.counts) * swarm.transport.message


def joining(swarm: Swarm, stage: int) -> float:
    """From a node's start until the driver can ask it: it joins, and a link is up."""
    rounds = 2 * JOINING * to_registry(swarm, stage)
    return rounds + to_registry(swarm, 0) + 2 * DIALLING * farthest(swarm)


def fetching(
    swarm: Swarm, stage: int, method: str, sources: Sequence[Group], twin: bool = False
) -> float:
    """From the driver's order until it hears that a node of `stage` has its state in place, or its
    twin of the next stage. `sources`: the groups whose nodes it is fetched from; all of them serve
    parts of it at once, each over a link of its own. Files are read from the storage."""
    order_and_answer = 2 * delay(swarm, 0, stage)
    of = (stage + 1) % (swarm.config.stages + 1) if twin else stage
    size = fetched_bytes(swarm.run, swarm.config, of, method)
    if method in ("checkpoint", "save"):
        return order_and_answer + size * 8 / (swarm.storage_mbps * 1e6)
    longest = 0.0
    for of in sorted({group.stage for group in sources}):
        groups = [group for group in sources if group.stage == of and group.count]
        links = [swarm.network.between(group.site, swarm.site_of(stage)) for group in groups]
        mbps = sum(link.mbps * group.count for link, group in zip(links, groups, strict=True))
        far = max(links, key=lambda link: link.delay_ms)
        share = size / sum(group.count for group in groups)
        asking = 2 * 2 * far.delay_ms / 1e3  # what there is, and the first of it
        longest = max(longest, asking + size * 8 / (mbps * 1e6) + slow_start(far, share))
    return order_and_answer + longest


def slow_start(link: Link, size: float) -> float:
    """By which `size` bytes on a new connection take longer than at the link's rate: TCP doubles
    what it sends in a round until that fills the link."""
    there_and_back = 2 * link.delay_ms / 1e3
    full = min(size, link.mbps * 1e6 / 8 * there_and_back)
    return there_and_back * max(0, math.ceil(math.log2(full / INITIAL_WINDOW + 1)) - 1)


def settling(swarm: Swarm, stage: int, method: str) -> float:
    """By which the first step with a newcomer takes longer, as its links are new: an activation and
    a gradient in, and out, unless the neighbours have just sent it the state over theirs."""
    ring = swarm.config.stages + 1
    size = frame_bytes(swarm.run, swarm.config, "activation")
    around = [swarm.link(stage, (stage + direction) % ring) for direction in (1, -1)]
    once = sum(slow_start(link, size) for link in around)
    return once if method in NEIGHBOURS else 2 * once


def relearning(swarm: Swarm, stage: int, method: str, at_most: float) -> float:
    """What was guessed is trained alone on what crossed its boundaries; its neighbours send it.
    `at_most`: seconds that it has (`recovery.relearning.time_for`)."""
    run, config = swarm.run, swarm.config
    recovery, training = run.recovery, run.training
    if method not in INEXACT or not recovery.relearn.passes or stage == 0:
        return 0.0
    seconds = next(group.seconds for group in swarm.groups if group.stage == stage)
    kept_size = kept_bytes(config, training.microbatch * config.context, run.wire)
    crossed = recovery.relearn.steps * training.microbatches * kept_size
    around = [swarm.link(stage - 1, stage), swarm.link((stage + 1) % (config.stages + 1), stage)]
    fetch = max(
        crossed * 8 / (link.mbps * 1e6) + 2 * link.delay_ms / 1e3 + slow_start(link, crossed)
        for link in around
    )
    return fetch + training_alone(swarm, stage, seconds, at_most)


def training_alone(swarm: Swarm, stage: int, seconds: Seconds, at_most: float) -> float:
    """A rebuilt stage's, until all its updates are made or its time is over. If the run file says
    what is `enough`, others wait until it is looked for the first time whether the stage is that
    good, or not at all where its guess is. What it learns beside steps isn't counted."""
    run, relearn = swarm.run, swarm.run.recovery.relearn
    some = relearned_at_a_time(run, swarm.config)
    a_pass = math.ceil(relearn.steps * run.training.batch / some)
    updates = pass_count(relearn.passes, (stage,)) * a_pass
    if relearn.enough:
        good = stage != FAR_OFF and relearn.enough >= GUESSED
        updates = 0 if good else min(updates, updates_per_check(a_pass))
    return min(at_most, updates * seconds.relearn)


def following(swarm: Swarm, stage: int) -> float:
    """From joining until a node has copied its stage's state from the replicas that train on. That
    the transfer competes with training for links is not counted."""
    sources = [group for group in swarm.groups if group.stage == stage]
    return joining(swarm, stage) + fetching(swarm, stage, "replica", sources)


def entering(swarm: Swarm) -> float:
    """By which all wait for a joiner: the driver gathers, and hears one more Ready."""
    return gathering(swarm) + 2 * farthest(swarm)


def writing(swarm: Swarm) -> float:
    """A checkpoint; stages write at once."""
    most = max(swarm.config.state_bytes(stage) for stage in (0, 1))
    return most * 8 / (swarm.storage_mbps * 1e6)
