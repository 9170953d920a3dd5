"""Scenarios in which nobody dies: what is merely sick costs steps at most, never state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from google.protobuf.message import DecodeError

from planaria.node.transaction.rules import TransactionRules
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.frames import Frame, WireError, buffers_of
from planaria.node.wire.tensors import encode
from planaria.recovery.decide import Policy
from simulation.scenario import Scenario

LONGEST_BLINK = 2.4
"""Seconds; `swarm.silence` is 3."""
PERIODS = [1.0, 2.0, 4.0, 9.0]
"""Seconds from one blink of a link to its next."""


class Sick(Scenario):
    """Links that blink, disks that fail, a registry whose journal lags behind."""

    def _rules(self, policy: Policy | None) -> TransactionRules:
        return replace(super()._rules(policy), steps=10)

    def _plan_faults(self) -> float:
        chosen, self.cluster.guilty = self.random, set()
        when = 0.0
        for fault in chosen.choices(self._faults(), k=chosen.randint(1, 6)):
            when += chosen.expovariate(0.5)
            self.world.after(when, self._strike, fault)
        return when

    def _faults(self) -> list[Callable[[], float]]:
        return [
            self._blink_host,
            self._blink_pair,
            self._blink_all,
            self._fail_disk,
            self._fail_journal,
        ]

    # --- links

    def _blink_host(self) -> float:
        """One host loses sight of all others, again and again."""
        one = self.random.choice(self._all_hosts())
        return self._blink([one], [host for host in self._all_hosts() if host != one])

    def _blink_pair(self) -> float:
        one, other = self.random.sample(self._all_hosts(), 2)
        return self._blink([one], [other])

    def _blink_all(self) -> float:
        """Each link by itself, at its own times."""
        hosts = self._all_hosts()
        pairs = [(one, other) for i, one in enumerate(hosts) for other in hosts[i + 1 :]]
        return max(self._blink([one], [other]) for one, other in pairs)

    def _all_hosts(self) -> list[str]:
        return [*sorted(self.cluster.hosts), "registry"]

    def _blink(self, left: list[str], right: list[str]) -> float:
        period, times = self.random.choice(PERIODS), self.random.randint(1, 6)
        when = self.random.uniform(0.0, period)
        for _ in range(times):
            seconds = min(LONGEST_BLINK, self.random.uniform(0.0, 0.9 * period))
            self.world.after(when, self._pause, left, right, seconds)
            when += period
        return when + LONGEST_BLINK

    def _pause(self, left: list[str], right: list[str], seconds: float) -> None:
        number, network = next(self._partitions), self.cluster.network
        if any(network.apart(one, other) for one in left for other in right):
            return  # together they would take too long
        sides = f"{' '.join(left)} from {' '.join(right)}"
        self.world.say("network", f"blinks for {seconds:.2f} s: {sides}")
        network.part(number, frozenset(left), frozenset(right))
        self.world.after(seconds, network.heal, number)

    # --- disks

    def _fail_disk(self) -> float:
        """Of some hosts: all that they write fails for a while, ledgers too."""
        failing, hosts = self.cluster.files.failing, sorted(self.cluster.hosts)
        hosts = self.random.sample(hosts, self.random.randint(1, len(hosts)))
        seconds = self.random.choice([1.0, 5.0, 20.0])
        self.world.say("disks", f"of {' '.join(hosts)} are full for {seconds:.0f} s")
        failing.update(hosts)
        self.world.after(seconds, failing.difference_update, hosts)
        return seconds

    def _fail_journal(self) -> float:
        """The registry crashes with a journal that lacks its newest views."""
        seconds = self.random.uniform(0.5, 8.0)
        self.world.say("registry", f"can't write its journal for {seconds:.1f} s")
        self.cluster.registry.fill_disk(seconds)
        self.world.after(self.random.uniform(0.0, seconds), self._crash_registry)
        return seconds + 15.0


class Poisoned(Sick):
    """One host sends what is wrong, for a while; what it is the guilty one of, the others outlive
    and are not blamed for."""

    def _plan_faults(self) -> float:
        chosen, self.cluster.guilty = self.random, set()
        when = chosen.uniform(1.0, 6.0)
        self.world.after(when, self._strike, self._poison)
        return when

    def ways(self) -> list[Callable[[Frame | pb.Message], Frame | pb.Message | None]]:
        return [self._deform, self._flip_frame]

    def _poison(self) -> float:
        way = self.random.choice(self.ways())
        hosts = sorted(host.name for host in self.cluster.hosts.values() if host.node)
        one, guilty = self.random.choice(hosts), self.cluster.guilty
        share, seconds = self.random.choice([0.01, 0.1, 1.0]), self.random.choice([5.0, 30.0])
        assert guilty is not None
        guilty.add(one)
        self.world.say(one, f"sends {share:.0%} wrong for {seconds:.0f} s: {way.__name__}")

        def tamper(item: Frame | pb.Message) -> Frame | pb.Message | None:
            return way(item) if self.random.random() < share else item

        self.cluster.tampering[one] = tamper
        self.world.after(seconds, self.cluster.tampering.pop, one)
        return seconds

    def _deform(self, item: Frame | pb.Message) -> Frame | pb.Message:
        """Tensors of another shape or dtype than is due, or another number of them."""
        if isinstance(item, pb.Message) or not item.descriptors:
            return item
        chosen = self.random
        shape = [chosen.randint(1, 5) for _ in range(chosen.randint(0, 3))]
        dtype = chosen.choice([torch.float32, torch.int64, torch.bfloat16])
        tensors = [torch.ones(shape, dtype=dtype)] * chosen.choice([1, 1, 2])
        descriptors, payload = encode(tensors, "none")
        return replace(item, descriptors=descriptors, payload=payload)

    def _flip_frame(self, item: Frame | pb.Message) -> Frame | pb.Message | None:
        """One bit of a frame is another one."""
        if isinstance(item, pb.Message):
            return item
        head, payload = item.head(), bytearray().join(buffers_of(item.payload))
        if payload and self.random.random() < 0.5:
            self._flip(payload)
            return replace(item, payload=payload)
        head = bytearray(head)
        self._flip(head)
        try:
            return Frame.parse(head, payload)
        except WireError:
            return None

    def _flip_message(self, item: Frame | pb.Message) -> Frame | pb.Message | None:
        """One bit of a message is another one."""
        if isinstance(item, Frame):
            return item
        sent = bytearray(item.SerializeToString())
        self._flip(sent)
        try:
            return pb.Message.FromString(bytes(sent))
        except DecodeError:
            return None

    def _flip(self, of: bytearray) -> None:
        bit = self.random.randrange(8 * len(of))
        of[bit // 8] ^= 1 << bit % 8


class Flipped(Poisoned):
    def ways(self) -> list[Callable[[Frame | pb.Message], Frame | pb.Message | None]]:
        return [self._flip_message]
