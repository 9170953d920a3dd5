"""Tests of the relay, with socket pairs in place of devices, and times as arguments."""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria_lab.emulation.links import Pipe, TokenBucket
from planaria_lab.emulation.relay import PacketRelay, address, segments, wire_bytes, without

HEADER = bytes(10)


def packet(to: str, body: bytes, header: bytes = HEADER) -> bytes:
    """Return a packet as a device delivers it: the card's header, an IPv4 header and the body."""
    return header + bytes(16) + ipaddress.IPv4Address(to).packed + body


@pytest.fixture
def machines() -> Iterator[Callable[[int], tuple[list[socket.socket], list[int]]]]:
    """Return a function that makes so many machines, and returns their ends and the relay's."""
    opened: list[socket.socket] = []

    def make(count: int) -> tuple[list[socket.socket], list[int]]:
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(count)]
        for end in (end for pair in pairs for end in pair):
            end.setblocking(False)
            opened.append(end)
        return [own for own, _ in pairs], [far.fileno() for _, far in pairs]

    yield make
    for end in opened:
        end.close()


def received(machine: socket.socket) -> list[bytes]:
    packets = []
    while True:
        try:
            packets.append(machine.recv(1 << 17)[30:])
        except BlockingIOError:
            return packets


def test_packets_reach_who_they_are_for_when_they_are_due(machines):
    (a, b, c), devices = machines(3)
    pipes = {
        (0, 1): Pipe([TokenBucket(8)], 0.1),  # one byte per microsecond
        (0, 2): Pipe([TokenBucket(8)], 0.02),
    }
    relay = PacketRelay(devices, pipes)
    for to, body in ((1, b"first"), (1, b"second"), (2, b"third")):
        a.send(packet(address(to), body))
    relay.take(devices[0], 5.0)
    assert relay.due() == pytest.approx(5.02 + 25e-6)
    relay.deliver(5.02)
    assert received(c) == []
    relay.deliver(5.05)
    assert received(c) == [b"third"]
    assert received(b) == []
    relay.deliver(5.1002)
    assert received(b) == [b"first", b"second"]
    assert received(a) == []
    assert relay.due() is None
    traffic_between = {(source, target): traffic for source, target, traffic in relay.traffic()}
    assert traffic_between[0, 1][:3] == (2, 20 + 5 + 20 + 6, 0)
    assert traffic_between[0, 2].late == pytest.approx(0.03 - 25e-6)


def test_links_change_on_the_way(machines):
    (a, b), devices = machines(2)
    relay = PacketRelay(devices, {(0, 1): Pipe([TokenBucket(8)], 0.1)})
    a.send(packet(address(1), b"quick"))
    relay.take(devices[0], 5.0)
    relay.change({(0, 1): Pipe([TokenBucket(8)], 0.5)})
    a.send(packet(address(1), b"slow"))
    relay.take(devices[0], 5.0)
    relay.deliver(5.2)
    assert received(b) == [b"quick"]
    relay.deliver(5.6)
    assert received(b) == [b"slow"]
    [(_, _, traffic)] = relay.traffic()
    assert traffic.packets == 2


def test_what_is_for_nobody_is_passed_over(machines):
    (a, b), devices = machines(2)
    relay = PacketRelay(devices, {(0, 1): Pipe([TokenBucket(8)], 0.0)})
    a.send(packet("192.0.2.1", b"lost"))
    a.send(packet(address(0), b"to itself"))
    a.send(b"short")
    relay.take(devices[0], 0.0)
    assert relay.due() is None
    assert received(b) == []


def test_a_full_queue_drops_and_counts(machines):
    (a, _), devices = machines(2)
    relay = PacketRelay(devices, {(0, 1): Pipe([TokenBucket(0.001)], 0.0)})  # 8 ms per byte
    for _ in range(8):
        a.send(packet(address(1), bytes(60_000)))
        relay.take(devices[0], 0.0)
    [(_, _, traffic)] = relay.traffic()
    assert traffic.packets + traffic.dropped == 8
    assert traffic.dropped > 0


def test_a_packet_counts_as_the_segments_that_a_card_would_cut_it_into():
    tcp = struct.pack("<BBHHHH", 1, 1, 40, 1448, 20, 16)
    assert wire_bytes(HEADER + bytes(1500)) == 1500
    assert wire_bytes(tcp + bytes(40 + 1448)) == 1488
    assert wire_bytes(tcp + bytes(40 + 3 * 1448 + 1)) == 3 * 1488 + 41


TCP = struct.Struct(">BBHHHBBH4s4sHHIIBBHHH")  # IPv4 and TCP, without options
BEGINS, ENDS = 0x80, 0x01 | 0x08  # flags: CWR; FIN and PSH


def tcp_packet(size: int, segment: int, sequence: int = 7, number: int = 9) -> bytes:
    """Return a packet as a kernel gives it to a card that makes segments and checksums of it."""
    card = struct.pack("<BBHHHH", 1, 1 if size > segment else 0, 40, segment, 20, 16)
    addresses = bytes((10, 77, 0, 1)), bytes((10, 77, 0, 2))
    ip = 0x45, 0, 40 + size, number, 0x4000, 64, 6, 0, *addresses
    tcp = 1, 2, sequence, 0, 0x50, 0x10 | BEGINS | ENDS, 100, 0, 0
    body = bytes(index // segment % 256 for index in range(size))
    return card + TCP.pack(*ip, *tcp) + body


def added_up(data: bytes) -> int:
    """Return the sum of RFC 1071; it is 0xFFFF for data that includes its own checksum."""
    total = sum(struct.unpack(f">{len(data) // 2}H", data))
    return (total - 1) % 0xFFFF + 1


@given(st.integers(1, 45), st.integers(1, 1448), st.integers(0, 2**32 - 1), st.data())
def test_what_is_left_of_a_packet_is_whole_packets(count, rest, sequence, data):
    whole = tcp_packet((count - 1) * 1448 + rest, 1448, sequence, number=0xFFFF)
    assert segments(whole) == count
    lost = data.draw(st.lists(st.integers(0, count - 1), unique=True).map(sorted))
    kept, delivered = [number for number in range(count) if number not in lost], []
    for piece in without(whole, lost):
        card = struct.unpack_from("<BBHHHH", piece)
        ip = TCP.unpack_from(piece, 10)
        length, number, at, flags, pseudo = ip[2], ip[3], ip[12], ip[15], ip[17]
        body = piece[10 + TCP.size :]
        assert length == len(piece) - 10
        assert card[1:4] == ((1, 40, 1448) if len(body) > 1448 else (0, 40, 0)) or not lost
        if lost:
            assert added_up(piece[10:30]) == 0xFFFF
            summed = piece[22:30] + struct.pack(">HH", 6, length - 20)
            assert pseudo == added_up(summed)
        first = (at - sequence) % 2**32 // 1448
        assert number == (0xFFFF + first) % 2**16
        here = list(range(first, first + segments(piece)))
        assert body == b"".join(whole[10 + TCP.size + number * 1448 :][:1448] for number in here)
        assert bool(flags & BEGINS) == (first == 0)
        assert flags & ENDS == (ENDS if here[-1] == count - 1 else 0)
        delivered += here
    assert delivered == kept


def test_a_link_that_loses_packets_counts_them(machines):
    (a, b), devices = machines(2)
    relay = PacketRelay(devices, {(0, 1): Pipe([TokenBucket(1e6)], 0.0, loss=0.5)})
    for _ in range(100):
        a.send(packet(address(1), b"body"))
        relay.take(devices[0], 0.0)
        relay.deliver(1.0)
    [(_, _, traffic)] = relay.traffic()
    assert 0 < traffic.lost < 100
    assert (traffic.packets, traffic.dropped) == (100, 0)
    assert len(received(b)) == 100 - traffic.lost


def test_a_receiver_that_takes_no_more_loses_packets_and_nothing_else(machines):
    (a, b), devices = machines(2)
    relay = PacketRelay(devices, {(0, 1): Pipe([TokenBucket(1e6)], 0.0)})
    sent = 0
    while not (dropped := relay.traffic()[0][2].dropped):
        a.send(packet(address(1), bytes(1000)))
        relay.take(devices[0], float(sent))
        relay.deliver(float(sent) + 1)
        sent += 1
    assert len(received(b)) == sent - dropped
