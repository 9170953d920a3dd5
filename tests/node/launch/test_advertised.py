"""Tests of the address that peers are told, on machines whose public address is another one."""

from __future__ import annotations

import logging

import pytest

from planaria.bootstrap.address import Address
from planaria.bootstrap.address_probe import Endpoints
from planaria.bootstrap.client import RegistryUnreachable
from planaria.node import serve
from planaria.node.launch.advertised import (
    Advertised,
    forwarded_address,
    is_known_otherwise,
    own_address,
    unforwarded_port,
)
from planaria.node.launch.notices import ADDRESS_VARIABLE
from tests.metadata_service import metadata_service
from tests.node.test_serve import CPU, setup

EVERYWHERE = Address.parse("0.0.0.0:7401")
BEHIND = Endpoints("172.17.0.2", "1.2.3.4")
"""The endpoints of a connection from a container through its host to a public registry."""
VAST = {
    "PUBLIC_IPADDR": "65.130.162.74",
    "VAST_TCP_PORT_22": "33525",
    "VAST_TCP_PORT_7401": "33526",
}
RUNPOD = {
    "RUNPOD_PUBLIC_IP": "194.68.245.12",
    "RUNPOD_TCP_PORT_22": "22077",
    "RUNPOD_TCP_PORT_7401": "22078",
}


def test_rented_containers_are_dialled_by_the_port_that_is_forwarded_to_them() -> None:
    assert forwarded_address(EVERYWHERE, {"HOME": "/root", **VAST}) == Advertised(
        Address("65.130.162.74", 33526),
        "vast.ai says so in PUBLIC_IPADDR and VAST_TCP_PORT_7401",
    )
    assert forwarded_address(EVERYWHERE, RUNPOD) == Advertised(
        Address("194.68.245.12", 22078),
        "RunPod says so in RUNPOD_PUBLIC_IP and RUNPOD_TCP_PORT_7401",
    )


@pytest.mark.parametrize("environment", [VAST, RUNPOD], ids=["vast.ai", "RunPod"])
def test_a_rented_container_that_nothing_is_forwarded_to_says_what_to_ask_for(environment) -> None:
    elsewhere, anywhere = Address.parse("0.0.0.0:7402"), Address.parse("0.0.0.0:0")
    assert forwarded_address(elsewhere, environment) is None
    advice = unforwarded_port(elsewhere, environment)
    assert "forwards nothing to port 7402 of this container" in advice
    assert "7402" in advice.partition("ask for")[2]
    assert "--listen 0.0.0.0:7402" in advice
    assert "--advertise none" in advice
    assert "--listen 0.0.0.0:7401" in unforwarded_port(anywhere, environment)
    assert unforwarded_port(elsewhere, {"HOME": "/root"}) == ""


@pytest.mark.parametrize(
    "wrong",
    [
        {"VAST_TCP_PORT_7401": "33526"},
        {"PUBLIC_IPADDR": "", "VAST_TCP_PORT_7401": "33526"},
        {"PUBLIC_IPADDR": "65.130.162.74", "VAST_TCP_PORT_7401": "none"},
        {"PUBLIC_IPADDR": "65.130.162.74", "VAST_TCP_PORT_7401": "0"},
        {"PUBLIC_IPADDR": "65.130.162.74", "VAST_TCP_PORT_7401": "70000"},
        {"PUBLIC_IPADDR": "65.130.162.74"},
    ],
)
def test_what_is_no_address_is_not_told(wrong) -> None:
    assert forwarded_address(EVERYWHERE, wrong) is None


@pytest.mark.parametrize(
    ("listen", "way", "otherwise"),
    [
        ("0.0.0.0:7401", BEHIND, True),
        ("172.17.0.2:7401", BEHIND, True),
        # the registry is on this machine: others use its public address
        ("0.0.0.0:7401", Endpoints("127.0.0.1", "127.0.0.1"), True),
        ("[::]:7401", Endpoints("fd00::2", "2606:4700::1111"), True),
        ("0.0.0.0:7401", Endpoints("5.6.7.8", "1.2.3.4"), False),  # its own is public
        ("5.6.7.8:7401", BEHIND, False),
        ("my.host.example.org:7401", BEHIND, False),
        # a private network, and an overlay network
        ("0.0.0.0:7401", Endpoints("10.0.0.7", "10.0.0.1"), False),
        ("0.0.0.0:7401", Endpoints("100.64.0.7", "100.64.0.1"), False),
        ("127.0.0.1:7401", BEHIND, False),
        ("localhost:7401", BEHIND, False),
    ],
)
def test_only_who_is_known_by_another_address_looks_for_it(listen, way, otherwise) -> None:
    assert is_known_otherwise(Address.parse(listen), way) is otherwise


def test_else_peers_are_told_what_the_machine_calls_itself() -> None:
    assert own_address(EVERYWHERE, BEHIND) == Advertised(
        Address("172.17.0.2", 7401), "connections to the registry at 1.2.3.4 come from it"
    )
    address = Address.parse("10.0.0.5:7401")
    assert own_address(address, BEHIND).address == address


async def tell(monkeypatch: pytest.MonkeyPatch, cloud: str, listen: str = "0.0.0.0:7401") -> str:
    async def way_out(*_: object) -> Endpoints:
        return BEHIND

    monkeypatch.setattr(serve, "way_out", way_out)
    chosen = setup(join="registry.example.org:7400", listen=listen, cloud=cloud)
    return (await serve.find_place(chosen, CPU)).advertise


async def test_a_node_says_where_it_is_and_how_it_knows(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "planaria")
    for name, value in VAST.items():
        monkeypatch.setenv(name, value)
    assert await tell(monkeypatch, "none") == "65.130.162.74:33526"
    assert "dial this node at 65.130.162.74:33526: vast.ai says so in PUBLIC_IPADDR" in caplog.text
    caplog.clear()
    assert await tell(monkeypatch, "none", "0.0.0.0:7402") == "172.17.0.2:7402"
    assert "vast.ai forwards nothing to port 7402" in caplog.text
    monkeypatch.setattr(serve, "way_out", None)
    settings = setup(join="1.2.3.4:7400", listen="0.0.0.0:7401", advertise="my.host:7401")
    assert (await serve.find_place(settings, CPU)).advertise == "my.host:7401"


@pytest.mark.parametrize("cloud", ["auto", "aws"])
async def test_aws_is_asked_for_the_public_address(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, cloud: str
) -> None:
    caplog.set_level(logging.INFO, "planaria")
    with metadata_service("aws") as service:
        monkeypatch.setenv(ADDRESS_VARIABLE, service.address)
        assert await tell(monkeypatch, cloud) == "172.17.0.2:7401"  # no public address
        service.public_ipv4 = "54.10.20.30"
        assert await tell(monkeypatch, cloud) == "54.10.20.30:7401"
        assert await tell(monkeypatch, cloud, "0.0.0.0:0") == "54.10.20.30:0"  # any port
        assert "AWS says that this is its public address" in caplog.text
        service.public_ipv4 = "<html>welcome</html>"
        assert await tell(monkeypatch, cloud) == "172.17.0.2:7401"
        assert "AWS reports no public address" in caplog.text


@pytest.mark.parametrize(
    ("service", "cloud"),
    [
        *(("aws", cloud) for cloud in ("none", "gcp", "azure")),
        *((other, "auto") for other in ("gcp", "azure", "nobody")),
    ],
)
async def test_aws_is_not_asked_where_cloud_says_so_and_no_other_is_taken_for_it(
    monkeypatch: pytest.MonkeyPatch, service: str, cloud: str
) -> None:
    with metadata_service(service) as started:
        monkeypatch.setenv(ADDRESS_VARIABLE, started.address)
        started.public_ipv4 = "54.10.20.30"
        assert await tell(monkeypatch, cloud) == "172.17.0.2:7401"
        assert service != "aws" or started.asked == []


async def test_without_a_route_to_the_registry_another_start_may_have_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def way_out(*_: object) -> Endpoints:
        raise OSError("this machine found no route")

    monkeypatch.setattr(serve, "way_out", way_out)
    chosen = setup(join="registry.example.org:7400", listen="0.0.0.0:7401", cloud="none")
    with pytest.raises(RegistryUnreachable, match="found no route"):
        await serve.find_place(chosen, CPU)
