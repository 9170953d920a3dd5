"""The process between emulated machines: it has one end of a TUN device in each of their network
namespaces, and passes packets on when their link would have them arrive.

It needs no netem, which not every kernel has, and nothing of it outlives the process: namespaces
and devices exist as long as somebody holds them open. Packets are taken from the kernel as it would
give them to a network card that cuts them up itself (up to 64 KiB at a time), which keeps a Python
loop quick enough for some 100 Mbit/s; `wire_bytes` counts them. A link that loses
packets loses them as a wire would, one segment by itself: what was taken at once is cut around it.

TCP in the namespaces has the congestion control that is Linux's default
(`CONGESTION`), whatever this machine's is: that decides what a link with losses carries.

Started by emulation.py as a module, it reads a network as JSON from the first line of its standard
input and writes what came of it; then it answers each further line with the traffic so far, until
the input ends. Such a line is empty, or it is a network of the same nodes, whose links hold from
then on.
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
"""Of all namespaces; nothing outside them can reach it."""
MTU: Final = 1500
DEVICE: Final = "wan0"
MOST_AT_ONCE: Final = 64
"""Packets read from a device before the others have their turn."""
CONGESTION: Final = "cubic"
PRIORITY: Final = -20  # nice: packets are on time however busy the machine is

# linux/if_tun.h, linux/virtio_net.h, linux/sched.h
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x1, 0x1000, 0x4000
_OFFLOADS = 0x1 | 0x2 | 0x4  # checksums, and cutting of TCP over IPv4 and IPv6
_CLONE_NEWNET = 0x40000000
_CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")
_VNET_HEADER = struct.Struct("<BBHHHH")  # flags, gso type, header and segment bytes, checksum
_DESTINATION = slice(_VNET_HEADER.size + 16, _VNET_HEADER.size + 20)
_BUFFER = 1 << 17
_FIN, _PSH, _CWR = 0x01, 0x08, 0x80
_TCP: Final = 6


class RelayedTraffic(NamedTuple):
    """One direction between two nodes so far. `late` is by how many seconds packets arrived after
    they should have, in all: the relay's own doing."""

    packets: int
    bytes: int  # as on a wire, with TCP/IP headers
    dropped: int  # packets
    late: float
    lost: int  # segments that the link itself lost


def address(number: int) -> str:
    """The address of the node with this number."""
    return str(SUBNET[number + 1])


def segments(packet: bytes) -> int:
    """The number of packets that it is on a wire."""
    kind, header, segment = _VNET_HEADER.unpack_from(packet)[1:4]
    size = len(packet) - _VNET_HEADER.size
    return -(-(size - int(header)) // int(segment)) if kind and segment else 1


def wire_bytes(packet: bytes) -> int:
    """The bytes of a packet on a wire: cut into segments, each with headers of its own."""
    header = int(_VNET_HEADER.unpack_from(packet)[2])
    return len(packet) - _VNET_HEADER.size + (segments(packet) - 1) * header


def without(packet: bytes, lost: Sequence[int]) -> Iterator[bytes]:
    """What is left of a packet when these of its segments are lost: one packet from each gap to the
    next. Only TCP over IPv4 comes in more than one segment."""
    begin = 0
    for end in (*lost, segments(packet)):
        if end > begin:
            yield _cut(packet, begin, end) if lost else packet
        begin = end + 1


def _cut(packet: bytes, begin: int, end: int) -> bytes:
    """A packet of these segments of it, as the sender's kernel would have made it."""
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
    # The card is to add up the rest: there is only the sum of addresses, protocol and length.
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
    pipe: Pipe
    to: int  # the device
    packets: int = 0
    bytes: int = 0
    dropped: int = 0
    late: float = 0.0
    lost: int = 0


class PacketRelay:
    """Carries packets between devices; `now` on the monotonic clock, in seconds."""

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
        """Read what a node has sent."""
        for _ in range(MOST_AT_ONCE):
            try:
                packet = os.read(device, _BUFFER)
            except BlockingIOError:
                return
            direction = self._ways.get((device, packet[_DESTINATION]))
            if direction is None:  # no business of ours, such as IPv6's look for routers
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
        """The links are these for what is taken from now on."""
        for way, pipe in pipes.items():
            self.directions[way].pipe = pipe

    def due(self) -> float | None:
        """The time at which the next packet arrives."""
        return self._under_way[0][0] if self._under_way else None

    def deliver(self, now: float) -> None:
        """Hand over what should have arrived."""
        while self._under_way and self._under_way[0][0] <= now:
            arrival, _, direction, packet = heapq.heappop(self._under_way)
            direction.late += now - arrival
            try:
                os.write(direction.to, packet)
            except OSError:  # the receiver's queue is full, or it takes no such packet
                direction.dropped += 1

    def traffic(self) -> list[tuple[int, int, RelayedTraffic]]:
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
    """A network namespace with a device in it, which this process moves to. Returns the descriptors
    of both, and TCP's congestion control there. Raises OSError, CalledProcessError."""
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
    """The control that connections have from the machine with this number, where this process is:
    `CONGESTION`, unless this kernel hasn't got it. By route, since what a namespace has by default
    has to be one that the machine allows everybody."""
    route = f"{SUBNET} dev {DEVICE} proto kernel scope link src {address(number)}"
    command = ["ip", "route", "replace", *route.split(), "congctl", CONGESTION]
    done = subprocess.run(command, check=False, capture_output=True).returncode == 0
    return CONGESTION if done else _CONGESTION.read_text().strip()


def numbered(network: Network) -> dict[tuple[int, int], Pipe]:
    """Its pipes, by the numbers of their nodes."""
    number = {name: i for i, name in enumerate(network.sites)}
    return {(number[a], number[b]): pipe for (a, b), pipe in network.pipes().items()}


def carry(relay: PacketRelay, devices: Sequence[int], control: TextIO) -> None:
    """Carries packets until `control` ends. Answers each line from there with the traffic so
    far. Nobody writes the next line before the answer, so none waits in a buffer."""
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
