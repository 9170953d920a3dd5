"""Seconds that a loss, a rebuild and a joiner cost, in closed form. They follow from the rounds of
messages that docs/protocol.md describes, and from the bytes that are fetched.
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
"""Round trips until a node has joined: one each for TCP, HTTP/2, the query what is trained, and the
request to join."""
DIALLING: Final = 2
"""Round trips until a link is up: one to connect, one for the handshake."""
INITIAL_WINDOW: Final = 10 * 1448
"""Bytes that TCP sends on a new connection before an acknowledgement arrives (RFC 6928)."""
NEIGHBOURS: Final = ("checkfree", "checkfree+", "interpolate", "replica")
"""Methods that fetch a state over the same links as the next step's frames."""
GUESSED: Final = 1.5
"""Upper bound of the residual error of most guessed stages. The error is as large as that of a
stage that passes its input on (lab/results/relearning-rates)."""
FAR_OFF: Final = 2
"""The stage whose guess has an error ten times as large; it is made mostly of stage 1."""


def delay(swarm: Swarm, a: int, b: int) -> float:
    """One-way delay in seconds between the first nodes of two stages."""
    return swarm.link(a, b).delay_ms / 1e3


def to_registry(swarm: Swarm, stage: int) -> float:
    """One-way delay in seconds between the first nodes of a stage and the registry."""
    site = swarm.registry or swarm.site_of(0)
    return swarm.network.between(swarm.site_of(stage), site).delay_ms / 1e3


def farthest(swarm: Swarm) -> float:
    """One-way delay in seconds between the driver and the node that is farthest from it."""
    driver = swarm.site_of(0)
    far = [swarm.network.between(driver, group.site).delay_ms for group in swarm.groups]
    return max(far) / 1e3


def noticed(swarm: Swarm, churn: Churn, stage: int) -> float:
    """Seconds from a loss until the driver has a view without the lost node.

    The node's connection to the registry is reset, and it doesn't reconnect. Or the node is silent,
    until a probe fails or its lease expires. A node that was given notice leaves by a message.
    """
    if churn.notice:
        wait = 0.0
    elif churn.silent:
        times = swarm.run.swarm
        wait = min(times.silence + _REGISTRY.probe_timeout, times.lease)
    else:
        wait = _REGISTRY.reconnect
    return wait + to_registry(swarm, stage) + to_registry(swarm, 0)


def notified(swarm: Swarm, churn: Churn, stage: int) -> float:
    """Seconds from a replica's loss until all nodes have the plan of a step that goes on without
    it. The driver notices that its link to the node is silent, or gets a view without the node."""
    silent = delay(swarm, 0, stage) + swarm.run.swarm.silence
    return min(silent, noticed(swarm, churn, stage)) + farthest(swarm)


def sending_again(swarm: Swarm, stage: int, microbatches: float) -> float:
    """Seconds until a node has the frames that a lost replica had received for so many
    microbatches. The stage before sends activations and the stage after gradients, at the same
    time."""
    ring = swarm.config.stages + 1
    seconds = 0.0
    for direction, kind in ((-1, "activation"), (1, "gradient")):
        link = swarm.link((stage + direction) % ring, stage)
        size = frame_bytes(swarm.run, swarm.config, kind)
        seconds = max(seconds, link.delay_ms / 1e3 + microbatches * size * 8 / (link.mbps * 1e6))
    return seconds


def gathering(swarm: Swarm) -> float:
    """Seconds in which the driver gathers: one query to all nodes, and their answers."""
    return 2 * farthest(swarm) + 2 * sum(swarm.counts) * swarm.transport.message


def joining(swarm: Swarm, stage: int) -> float:
    """Seconds from a node's start until the driver can query it: the node joins, the driver gets
    the view, and a link is up."""
    rounds = 2 * JOINING * to_registry(swarm, stage)
    return rounds + to_registry(swarm, 0) + 2 * DIALLING * farthest(swarm)


def fetching(
    swarm: Swarm, stage: int, method: str, sources: Sequence[Group], twin: bool = False
) -> float:
    """Seconds from the driver's order until it hears that a node of `stage` has fetched its state.

    With `twin`, the node fetches its twin of the next stage instead. `sources`: groups of the nodes
    that serve the state. They serve parts of it at once, each over its own link. Files are read
    from the storage.
    """
    order_and_answer = 2 * delay(swarm, 0, stage)
    fetched_stage = (stage + 1) % (swarm.config.stages + 1) if twin else stage
    size = fetched_bytes(swarm.run, swarm.config, fetched_stage, method)
    if method in ("checkpoint", "save"):
        return order_and_answer + size * 8 / (swarm.storage_mbps * 1e6)
    longest = 0.0
    for source_stage in sorted({group.stage for group in sources}):
        groups = [group for group in sources if group.stage == source_stage and group.count]
        links = [swarm.network.between(group.site, swarm.site_of(stage)) for group in groups]
        mbps = sum(link.mbps * group.count for link, group in zip(links, groups, strict=True))
        far = max(links, key=lambda link: link.delay_ms)
        share = size / sum(group.count for group in groups)
        asking = 2 * 2 * far.delay_ms / 1e3  # round trips: the manifest, and the first bytes
        longest = max(longest, asking + size * 8 / (mbps * 1e6) + slow_start(far, share))
    return order_and_answer + longest


def slow_start(link: Link, size: float) -> float:
    """Additional seconds of sending `size` bytes on a new connection, compared with the link's full
    rate. TCP doubles the bytes it sends in a round trip until they fill the link."""
    there_and_back = 2 * link.delay_ms / 1e3
    full = min(size, link.mbps * 1e6 / 8 * there_and_back)
    return there_and_back * max(0, math.ceil(math.log2(full / INITIAL_WINDOW + 1)) - 1)


def settling(swarm: Swarm, stage: int, method: str) -> float:
    """Additional seconds of the first step with a newcomer, because TCP starts slowly on its links.

    An activation and a gradient come in, and go out. If the neighbours have just sent the newcomer
    its state, the links to it are no longer new, and only the others count.
    """
    ring = swarm.config.stages + 1
    size = frame_bytes(swarm.run, swarm.config, "activation")
    links = [swarm.link(stage, (stage + direction) % ring) for direction in (1, -1)]
    once = sum(slow_start(link, size) for link in links)
    return once if method in NEIGHBOURS else 2 * once


def relearning(swarm: Swarm, stage: int, method: str, at_most: float) -> float:
    """Seconds in which a rebuilt stage relearns while others wait, with the transfer of its data.

    A guessed stage is trained alone on the tensors that crossed its boundaries; its neighbours send
    them. The result is 0 for exact methods and for stage 0. `at_most`: limit of the training in
    seconds (`recovery.relearning.time_for`).
    """
    run, config = swarm.run, swarm.config
    recovery, training = run.recovery, run.training
    if method not in INEXACT or not recovery.relearn.passes or stage == 0:
        return 0.0
    seconds = next(group.seconds for group in swarm.groups if group.stage == stage)
    kept_size = kept_bytes(config, training.microbatch * config.context, run.wire)
    size = recovery.relearn.steps * training.microbatches * kept_size
    links = [swarm.link(stage - 1, stage), swarm.link((stage + 1) % (config.stages + 1), stage)]
    fetch = max(
        size * 8 / (link.mbps * 1e6) + 2 * link.delay_ms / 1e3 + slow_start(link, size)
        for link in links
    )
    return fetch + training_alone(swarm, stage, seconds, at_most)


def training_alone(swarm: Swarm, stage: int, seconds: Seconds, at_most: float) -> float:
    """Seconds that others wait for a rebuilt stage's relearning updates, at most `at_most`.

    If the run file has `relearn.enough`, they wait only until the first check of the result. They
    don't wait at all if the guess itself is good enough. Relearning beside steps isn't counted.
    """
    run, relearn = swarm.run, swarm.run.recovery.relearn
    samples = relearned_at_a_time(run, swarm.config)
    per_pass = math.ceil(relearn.steps * run.training.batch / samples)
    updates = pass_count(relearn.passes, (stage,)) * per_pass
    if relearn.enough:
        good = stage != FAR_OFF and relearn.enough >= GUESSED
        updates = 0 if good else min(updates, updates_per_check(per_pass))
    return min(at_most, updates * seconds.relearn)


def following(swarm: Swarm, stage: int) -> float:
    """Seconds from a node's start until it has copied its stage's state from replicas, which go on
    training. The transfer counts as if it had the links to itself."""
    sources = [group for group in swarm.groups if group.stage == stage]
    return joining(swarm, stage) + fetching(swarm, stage, "replica", sources)


def entering(swarm: Swarm) -> float:
    """Seconds that all nodes wait for a joiner: the driver gathers, and one more round of messages
    ends with the joiner's Ready."""
    return gathering(swarm) + 2 * farthest(swarm)


def writing(swarm: Swarm) -> float:
    """Seconds of writing a checkpoint; all stages write at once."""
    most = max(map(swarm.config.state_bytes, range(swarm.config.stages + 1)))
    return most * 8 / (swarm.storage_mbps * 1e6)
