"""The relay process: it carries packets between emulated machines, each with the delay of its link.

It holds a TUN device in the network namespace of each machine. It needs no netem, which not every
kernel has. Nothing outlives the process: namespaces and devices exist only while a process holds
them open. The kernel passes packets as to a network card that segments them itself, up to 64 KiB at
a time. So a Python loop is fast enough for about 100 Mbit/s; `wire_bytes` counts the bytes. Links
lose single segments, as a wire does: the packet is cut at the lost ones.

TCP in the namespaces uses Linux's default congestion control (`CONGESTION`), whatever this
machine's is. On it depends the throughput of a link with losses.

emulation.py starts this module as a process. The first line of its standard input is a network as
JSON; it answers with the namespaces, or an error. It answers each further line with the traffic so
far, until the input ends. Such a line is empty, or is a network of the same nodes, whose links
replace the former ones.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import ipaddress
import json
import os
import select
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, TextIO

from pydantic import TypeAdapter

from planaria.node.machine.processes import die_with_parent
from planaria_lab.emulation.links import Network, Pipe

NETWORK: Final = TypeAdapter(Network)
SUBNET: Final = ipaddress.IPv4Network("10.77.0.0/16")
"""Addresses of all namespaces; they can't be reached from outside."""
MTU: Final = 1500
DEVICE: Final = "wan0"
MOST_AT_ONCE: Final = 64
"""Maximum number of packets read from a device before the next device's turn."""
CONGESTION: Final = "cubic"
PRIORITY: Final = -20  # nice value, so that packets are on time on a busy machine

# linux/if_tun.h, linux/virtio_net.h, linux/sched.h
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x1, 0x1000, 0x4000
_OFFLOADS = 0x1 | 0x2 | 0x4  # checksums, and segmentation of TCP over IPv4 and IPv6
_CLONE_NEWNET = 0x40000000
_CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")
_VNET_HEADER = struct.Struct("<BBHHHH")  # flags, gso type, header and segment bytes, checksum
_DESTINATION = slice(_VNET_HEADER.size + 16, _VNET_HEADER.size + 20)
_BUFFER = 1 << 17
_FIN, _PSH, _CWR = 0x01, 0x08, 0x80
_TCP: Final = 6


class RelayedTraffic(NamedTuple):
    """The traffic so far in one direction between two nodes. `late`: sum over all packets of the
    seconds by which the relay delivered them too late."""

    packets: int
    bytes: int  # as on a wire, with TCP/IP headers
    dropped: int  # packets
    late: float
    lost: int  # segments that the link lost at random


def address(number: int) -> str:
    """The address of the node with this number."""
    return str(SUBNET[number + 1])


def segments(packet: bytes) -> int:
    """The number of wire packets that the packet is segmented into."""
    kind, header, segment = _VNET_HEADER.unpack_from(packet)[1:4]
    size = len(packet) - _VNET_HEADER.size
    return -(-(size - int(header)) // int(segment)) if kind and segment else 1


def wire_bytes(packet: bytes) -> int:
    """The bytes of a packet on a wire: each of its segments has its own headers."""
    header = int(_VNET_HEADER.unpack_from(packet)[2])
    return len(packet) - _VNET_HEADER.size + (segments(packet) - 1) * header


def without(packet: bytes, lost: Sequence[int]) -> Iterator[bytes]:
    """The rest of a packet after these of its segments are lost: one packet for each run of
    remaining segments. Only TCP over IPv4 has more than one segment."""
    begin = 0
    for end in (*lost, segments(packet)):
        if end > begin:
            yield _cut(packet, begin, end) if lost else packet
        begin = end + 1


def _cut(packet: bytes, begin: int, end: int) -> bytes:
    """A packet of the segments `begin` to `end` - 1, as the sender's kernel would have made it."""
    flags, kind, _, segment, at, checksum = _VNET_HEADER.unpack_from(packet)
    ip, tcp = _VNET_HEADER.size, _VNET_HEADER.size + (packet[_VNET_HEADER.size] & 15) * 4
    body = tcp + (packet[tcp + 12] >> 4) * 4
    last = body + end * segment >= len(packet)
    data = packet[body + begin * segment : body + end * segment]
    head = bytearray(packet[:body])
    several = end - begin > 1
    size = body - ip
    more = (kind, size, segment) if several else (0, size, 0)
    _VNET_HEADER.pack_into(head, 0, flags, *more, at, checksum)
    struct.pack_into(">H", head, ip + 2, size + len(data))
    number = int.from_bytes(head[ip + 4 : ip + 6], "big") + begin
    struct.pack_into(">H", head, ip + 4, number & 0xFFFF)
    struct.pack_into(">H", head, ip + 10, 0)
    struct.pack_into(">H", head, ip + 10, _sum16(head[ip:tcp]) ^ 0xFFFF)
    sequence = int.from_bytes(head[tcp + 4 : tcp + 8], "big") + begin * segment
    struct.pack_into(">I", head, tcp + 4, sequence & 0xFFFFFFFF)
    head[tcp + 13] &= ~(_CWR if begin else 0) & ~(0 if last else _FIN | _PSH)
    # The network card completes the checksum: here it covers addresses, protocol and length only.
    pseudo = head[ip + 12 : ip + 20] + struct.pack(">HH", _TCP, body - tcp + len(data))
    struct.pack_into(">H", head, tcp + 16, _sum16(pseudo))
    return bytes(head) + data


def _sum16(data: bytes | bytearray) -> int:
    """The sum of the Internet checksum (RFC 1071), not complemented."""
    total: int = sum(struct.unpack(f">{len(data) // 2}H", data))
    while total > 0xFFFF:
        total = (total & 0xFFFF) + (total >> 16)
    return total


@dataclass
class _Direction:
    """One direction between two nodes: its pipe, and counters as in `RelayedTraffic`."""

    pipe: Pipe
    to: int  # device of the receiver
    packets: int = 0
    bytes: int = 0
    dropped: int = 0
    late: float = 0.0
    lost: int = 0


class PacketRelay:
    """Carries packets between devices. `now`: seconds of the monotonic clock."""

    def __init__(self, devices: Sequence[int], pipes: Mapping[tuple[int, int], Pipe]) -> None:
        """Node i has the device `devices[i]` and `address(i)`."""
        self.directions = {(a, b): _Direction(pipe, devices[b]) for (a, b), pipe in pipes.items()}
        self._ways = {
            (devices[a], ipaddress.IPv4Address(address(b)).packed): direction
            for (a, b), direction in self.directions.items()
        }
        self._under_way: list[tuple[float, int, _Direction, bytes]] = []
        self._taken = 0

    def take(self, device: int, now: float) -> None:
        """Reads packets that a node has sent, and plans their arrival."""
        for _ in range(MOST_AT_ONCE):
            try:
                packet = os.read(device, _BUFFER)
            except BlockingIOError:
                return
            direction = self._ways.get((device, packet[_DESTINATION]))
            if direction is None:  # to no node, such as IPv6 router discovery
                continue
            size = wire_bytes(packet)
            arrival = direction.pipe.arrival(size, now)
            if arrival is None:
                direction.dropped += 1
                continue
            direction.packets += 1
            direction.bytes += size
            lost = direction.pipe.lost(segments(packet))
            direction.lost += len(lost)
            for piece in without(packet, lost):
                self._taken += 1
                heapq.heappush(self._under_way, (arrival, self._taken, direction, piece))

    def change(self, pipes: Mapping[tuple[int, int], Pipe]) -> None:
        """Replaces the links, for packets read from now on."""
        for way, pipe in pipes.items():
            self.directions[way].pipe = pipe

    def due(self) -> float | None:
        """The time at which the next packet arrives; None: no packet is under way."""
        return self._under_way[0][0] if self._under_way else None

    def deliver(self, now: float) -> None:
        """Hands packets that should have arrived to their receivers."""
        while self._under_way and self._under_way[0][0] <= now:
            arrival, _, direction, packet = heapq.heappop(self._under_way)
            direction.late += now - arrival
            try:
                os.write(direction.to, packet)
            except OSError:  # the receiver's queue is full, or it refuses the packet
                direction.dropped += 1

    def traffic(self) -> list[tuple[int, int, RelayedTraffic]]:
        """The traffic so far as (from, to, counters), by node numbers."""
        return [
            (
                a,
                b,
                RelayedTraffic(
                    direction.packets,
                    direction.bytes,
                    direction.dropped,
                    direction.late,
                    direction.lost,
                ),
            )
            for (a, b), direction in self.directions.items()
        ]


def make_machine(number: int) -> tuple[int, int, str]:
    """Makes a network namespace with a TUN device, and moves this process to it. Returns the
    descriptors of both, and the name of TCP's congestion control there. Raises OSError,
    CalledProcessError."""
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET):
        failed = ctypes.get_errno()
        raise OSError(failed, f"can't make a network namespace: {os.strerror(failed)}")
    namespace = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    flags = _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), flags))
    fcntl.ioctl(device, _TUNSETOFFLOAD, _OFFLOADS)
    commands = (
        f"address add {address(number)}/{SUBNET.prefixlen} dev {DEVICE}\n"
        f"link set {DEVICE} mtu {MTU} up\n"
        "link set lo up\n"
    )
    subprocess.run(
        ["ip", "-batch", "-"], input=commands, check=True, capture_output=True, text=True
    )
    return namespace, device, congestion(number)


def congestion(number: int) -> str:
    """Sets TCP's congestion control in this process's namespace, that of machine `number`.

    Returns its name: `CONGESTION`, or the default if this kernel doesn't have it. It is set for the
    route. A namespace's default must be an algorithm that the machine allows to everybody.
    """
    route = f"{SUBNET} dev {DEVICE} proto kernel scope link src {address(number)}"
    command = ["ip", "route", "replace", *route.split(), "congctl", CONGESTION]
    done = subprocess.run(command, check=False, capture_output=True).returncode == 0
    return CONGESTION if done else _CONGESTION.read_text().strip()


def numbered(network: Network) -> dict[tuple[int, int], Pipe]:
    """The network's pipes, by the numbers of their nodes."""
    number = {name: i for i, name in enumerate(network.sites)}
    return {(number[a], number[b]): pipe for (a, b), pipe in network.pipes().items()}


def carry(relay: PacketRelay, devices: Sequence[int], control: TextIO) -> None:
    """Carries packets until `control` ends. Answers each line of `control` with the traffic so far.
    The next line is written only after the answer, so no line waits in a buffer."""
    waiting: list[int | TextIO] = [*devices, control]
    while True:
        due = relay.due()
        patience = None if due is None else max(0.0, due - time.monotonic())
        readable, _, _ = select.select(waiting, [], [], patience)
        now = time.monotonic()
        for device in readable:
            if isinstance(device, int):
                relay.take(device, now)
            elif not (line := control.readline()):
                return
            else:
                if line.strip():
                    relay.change(numbered(NETWORK.validate_json(line)))
                print(json.dumps(relay.traffic()), flush=True)
        relay.deliver(time.monotonic())


def main() -> None:
    """The relay process: makes the machines, then carries packets until standard input ends."""
    die_with_parent()
    network = NETWORK.validate_json(sys.stdin.readline())
    try:
        os.setpriority(os.PRIO_PROCESS, 0, PRIORITY)
        machines = [make_machine(i) for i in range(len(network.sites))]
    except (OSError, subprocess.CalledProcessError) as error:
        detail = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else ""
        print(json.dumps({"error": f"{error} {detail}".strip()}), flush=True)
        return
    namespaces, devices, controls = zip(*machines, strict=True)
    print(json.dumps({"namespaces": namespaces, "congestion": controls[0]}), flush=True)
    carry(PacketRelay(devices, numbered(network)), devices, sys.stdin)


if __name__ == "__main__":
    main()
