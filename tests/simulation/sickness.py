"""Scenarios in which no node dies: their faults cost steps at most, never state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from planaria.node.transaction.rules import TransactionRules
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.frame_format import Frame
from planaria.node.wire.tensors import encode
from simulation.cluster import Host
from simulation.scenario import Scenario

SHORT, LONG = 2.4, 9.0
"""Maximum seconds of an interruption ("blink") and of a long one; `swarm.silence` is 3. Long ones
are of links between nodes only."""
REST = 8.0
"""Seconds between a long blink of a link and its next blink."""
PERIODS = [1.0, 2.0, 4.0, 9.0]
"""Seconds from one blink of a link to its next."""


class Sick(Scenario):
    """Links blink, or lose data one way; disks fail; the registry's journal lags behind."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        if self.world.straggling:  # with many late deliveries, a blink may last too long
            self.cluster.unheard.update(self.cluster.hosts)

    def _rules(self, policy: str | None) -> TransactionRules:
        return replace(super()._rules(policy), steps=10)

    def _plan_faults(self) -> float:
        chosen, self.cluster.guilty = self.random, set()
        self.rested: dict[frozenset[str], float] = {}  # by pair of hosts: from when on it may blink
        self.away: dict[str, float] = {}  # by host: until when it is cut off from the registry
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
            self._blink_long,
            self._isolate_from_nodes,
            self._isolate_from_registry,
            self._part_two,
            self._fill_disks,
            self._err_writing,
            self._fail_journal,
        ]

    # --- links

    def _blink_host(self) -> float:
        """Interrupts all links of one host, again and again."""
        blinking = self.random.choice(self._all_hosts())
        return self._blink([blinking], [host for host in self._all_hosts() if host != blinking])

    def _blink_pair(self) -> float:
        host, other = self.random.sample(self._all_hosts(), 2)
        return self._blink([host], [other])

    def _blink_all(self) -> float:
        """Interrupts each link, at times of its own."""
        hosts = self._all_hosts()
        pairs = [(host, other) for i, host in enumerate(hosts) for other in hosts[i + 1 :]]
        return max(self._blink([host], [other]) for host, other in pairs)

    def _all_hosts(self) -> list[str]:
        return [*sorted(self.cluster.hosts), "registry"]

    def _blink(self, left: list[str], right: list[str]) -> float:
        period, times = self.random.choice(PERIODS), self.random.randint(1, 6)
        when = self.random.uniform(0.0, period)
        for _ in range(times):
            seconds = min(SHORT, self.random.uniform(0.0, 0.9 * period))
            self.world.after(when, self._pause, left, right, seconds)
            when += period
        return when + SHORT

    def _blink_long(self) -> float:
        """Interrupts links of some pairs, so long that they may be lost."""
        hosts, seconds = sorted(self.cluster.hosts), 0.0
        for _ in range(self.random.randint(1, 4)):
            host, other = self.random.sample(hosts, 2)
            seconds = max(seconds, self._lose([host], [other], self.random.uniform(1.0, LONG)))
        return seconds

    def _isolate_from_nodes(self) -> float:
        """Cuts one host off from all others, but not from the registry."""
        hosts = sorted(self.cluster.hosts)
        alone = self.random.choice(hosts)
        others = [host for host in hosts if host != alone]
        return self._lose([alone], others, self.random.uniform(1.0, LONG))

    def _isolate_from_registry(self) -> float:
        """Cuts a host off from the registry, so long that it may lose its place to a replica."""
        host, now = self.random.choice(sorted(self.cluster.hosts)), self.world.now
        seconds = self.random.uniform(3.0, 20.0)
        if any(host in pair and until > now + SHORT for pair, until in self.rested.items()):
            return 0.0  # otherwise nobody could reach it
        self.cluster.unheard.add(host)
        self.away[host] = now + seconds + REST
        return self._lose([host], ["registry"], seconds)

    def _part_two(self) -> float:
        """Cuts two hosts off from each other, so long that another one has to relay their link."""
        host, other = self.random.sample(sorted(self.cluster.hosts), 2)
        return self._lose([host], [other], self.random.uniform(10.0, 40.0))

    def _lose(self, left: list[str], right: list[str], seconds: float) -> float:
        self._pause(left, right, seconds)
        return seconds + REST

    def _pause(self, left: list[str], right: list[str], seconds: float) -> None:
        number, network, now = next(self._partitions), self.cluster.network, self.world.now
        pairs = [frozenset((host, other)) for host in left for other in right]
        if any(self.rested.get(pair, 0.0) > now for pair in pairs):
            return  # two such faults together would take too long
        away = any(self.away.get(host, 0.0) > now for host in (*left, *right))
        again = any(self.rested.get(pair, -REST) > now - REST for pair in pairs)
        if away and "registry" not in right and (seconds > SHORT or again):
            return  # nobody could reach a host that is away from the registry
        rest = REST if seconds > SHORT else 0.0
        self.rested |= dict.fromkeys(pairs, now + seconds + rest)
        both_ways, resets = self.random.random() < 0.6, self.random.random() < 0.5
        how = "blink" if both_ways else "lose what goes there"
        sides = f"{' '.join(left)} and {' '.join(right)}"
        self.world.say("network", f"{sides} {how} for {seconds:.2f} s")
        if resets:
            if self.cluster.registry.name in (*left, *right):  # noticed late where nothing passes
                self.cluster.unheard |= {*left, *right}
            for connection in network.connections:
                if frozenset(end.process.host for end in connection.ends) in pairs:
                    connection.break_off()
        network.part(number, frozenset(left), frozenset(right), both_ways)
        self.world.after(seconds, network.heal, number)

    # --- disks

    def _fill_disks(self) -> float:
        """Makes all writes of some hosts fail for a while, ledgers too."""
        hosts = sorted(self.cluster.hosts)
        hosts = self.random.sample(hosts, self.random.randint(1, len(hosts)))
        return self._fail_writes(hosts, 1.0)

    def _err_writing(self) -> float:
        """Makes some writes of one host fail."""
        return self._fail_writes([self.random.choice(sorted(self.cluster.hosts))], 0.3)

    def _fail_writes(self, hosts: list[str], share: float) -> float:
        failing, seconds = self.cluster.files.failing, self.random.choice([1.0, 5.0, 20.0])
        names = " ".join(hosts)
        self.world.say("disks", f"of {names} fail {share:.0%} of writes for {seconds:.0f} s")
        failing |= dict.fromkeys(hosts, share)

        def heal() -> None:
            for host in hosts:
                failing.pop(host, None)

        self.world.after(seconds, heal)
        return seconds

    def _fail_journal(self) -> float:
        """Crashes the registry with a journal that may lack its newest views."""
        seconds = self.random.uniform(0.5, 8.0)
        self.world.say("registry", f"can't write its journal for {seconds:.1f} s")
        self.cluster.registry.fill_disk(seconds)
        self.world.after(self.random.uniform(0.0, seconds), self._crash_registry)
        return seconds + 15.0


class Poisoned(Sick):
    """One host sends invalid data for a while. The others survive it, and are not blamed for it."""

    def _plan_faults(self) -> float:
        chosen, self.cluster.guilty = self.random, set()
        when = chosen.uniform(1.0, 6.0)
        self.world.after(when, self._strike, self._poison)
        return when

    def ways(self) -> list[Callable[[str, float], None]]:
        return [self._deform, self._flip_chunks]

    def _poison(self) -> float:
        way = self.random.choice(self.ways())
        hosts = sorted(host.name for host in self.cluster.hosts.values() if host.node)
        if not hosts:  # nobody has started yet
            self.world.after(1.0, self._strike, self._poison)
            return 1.0
        culprit, guilty = self.random.choice(hosts), self.cluster.guilty
        share, seconds = self.random.choice([0.01, 0.1, 1.0]), self.random.choice([5.0, 30.0])
        assert guilty is not None
        guilty.add(culprit)
        self.world.say(culprit, f"sends {share:.0%} wrong for {seconds:.0f} s: {way.__name__}")
        way(culprit, share)
        self.world.after(seconds, self._heal, culprit)
        return seconds

    def _heal(self, host: str) -> None:
        self.cluster.tampering.pop(host, None)
        self.cluster.garbling.pop(host, None)

    def _deform(self, host: str, share: float) -> None:
        """Sends tensors of a wrong shape or dtype, or a wrong number of them."""

        def deformed(item: Frame | pb.Message) -> Frame | pb.Message:
            chosen = self.random
            if isinstance(item, pb.Message) or not item.descriptors or chosen.random() >= share:
                return item
            shape = [chosen.randint(1, 5) for _ in range(chosen.randint(0, 3))]
            dtype = chosen.choice([torch.float32, torch.int64, torch.bfloat16])
            tensors = [torch.ones(shape, dtype=dtype)] * chosen.choice([1, 1, 2])
            descriptors, payload = encode(tensors, "none")
            return replace(item, descriptors=descriptors, payload=payload)

        self.cluster.tampering[host] = deformed

    def _flip_chunks(self, host: str, share: float) -> None:
        self._flip_bits(host, "bulk", share)

    def _flip_messages(self, host: str, share: float) -> None:
        self._flip_bits(host, "control", share)

    def _flip_bits(self, host: str, of: str, share: float) -> None:
        """Flips one bit in this share of what the host writes."""

        def flipped(channel: str, data: bytes) -> bytes:
            if channel != of or self.random.random() >= share:
                return data
            bit, changed = self.random.randrange(8 * len(data)), bytearray(data)
            changed[bit // 8] ^= 1 << bit % 8
            return bytes(changed)

        self.cluster.garbling[host] = flipped


class Flipped(Poisoned):
    def ways(self) -> list[Callable[[str, float], None]]:
        return [self._flip_messages]


class Spoilt(Poisoned):
    """One host computes values that are not finite."""

    def ways(self) -> list[Callable[[str, float], None]]:
        return [self._spoil]

    def _spoil(self, host: str, share: float) -> None:
        self.cluster.spoiling[host] = lambda: self.random.random() < share

    def _heal(self, host: str) -> None:
        self.cluster.spoiling.pop(host, None)


class Miscomputing(Sick):
    """One host computes wrong results, always or at times; each stage has three nodes."""

    def _rules(self, policy: str | None) -> TransactionRules:
        rules = super()._rules(policy)
        return replace(rules, steps=30, microbatches=max(4, rules.microbatches), spot_check=0.5)

    def _hosts(self, rules: TransactionRules) -> list[Host]:
        return [Host(f"{name}{s}", s, False) for name in "abc" for s in range(rules.stages + 1)]

    def _plan_faults(self) -> float:
        self.cluster.guilty = set()
        self.world.after(self.random.uniform(1.0, 4.0), self._strike, self._miscompute)
        return 4.0

    def _miscompute(self) -> float:
        guilty, host = self.cluster.guilty, self.random.choice(sorted(self.cluster.hosts))
        share = self.random.choice([0.2, 1.0])
        assert guilty is not None
        guilty.add(host)
        self.world.say(host, f"computes wrongly in {share:.0%} of its passes")
        self.cluster.miscomputing[host] = lambda: self.random.random() < share
        return 0.0


class Corrupted(Sick):
    """The weights or moments of one replica change, or an update of them is wrong."""

    def _plan_faults(self) -> float:
        chosen, self.cluster.guilty = self.random, set()
        when = 0.0
        for _ in range(chosen.randint(1, 4)):
            when += chosen.uniform(0.5, 4.0)
            self.world.after(when, self._strike, self._corrupt)
        return when

    def _hosts(self, rules: TransactionRules) -> list[Host]:
        replicas = self.random.choice([2, 2, 3])
        stages = range(rules.stages + 1)
        return [Host(f"{replica}{s}", s, False) for replica in "abc"[:replicas] for s in stages]

    def _corrupt(self) -> float:
        guilty = self.cluster.guilty
        assert guilty is not None
        trains = [s for node in self._some() for s in node.seats.agents.values() if s.trains]
        many = Counter(seat.stage for seat in trains)
        trains = [seat for seat in trains if many[seat.stage] > 1]
        trains = [seat for seat in trains if not guilty or seat.process.host in guilty]
        if trains:
            seat, update = self.random.choice(trains), self.random.random() < 0.3
            self.world.say(seat.name, "updates wrongly, once" if update else "has wrong weights")
            guilty.add(seat.process.host)
            self.cluster.corrupt(seat, update)
        return 10.0
