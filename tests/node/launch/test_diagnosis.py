"""Tests of the doctor's findings from given facts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from planaria.bootstrap.address_probe import proxies
from planaria.node.launch.diagnosis import (
    Clock,
    Data,
    Device,
    DialledBack,
    DiskFacts,
    Facts,
    Finding,
    Grade,
    LinkFacts,
    UnknownFact,
    bytes_a_step,
    finding_lines,
    findings,
    worst_grade,
)
from planaria.node.model.shape import COMPUTED
from planaria.node.run_file import loads, override
from planaria.node.stage.activations import saved_bytes

RUN = loads("training.optimizer = 'adamw'\n[model]\npreset = 'small'\nvocabulary = 2048\n")
FIRST, BODY = RUN.model.config.parameters
NEEDED_FIRST, NEEDED_BODY = (
    24 * parameters + saved_bytes(RUN, RUN.config, stage)
    for stage, parameters in enumerate((FIRST, BODY))
)
"""Bytes of a node of stage 0 and of a body stage: 1.5 times Adam's 16 per parameter, and the
activations of one microbatch."""
WELL = Facts(
    version="1.2",
    protocol=5,
    registry_protocol=5,
    run=RUN,
    tokens_per_second=0.0,
    tls=True,
    loopback=False,
    clock=Clock(0.01, 0.02),
    port="0.0.0.0:7401",
    advertise=None,
    back=DialledBack("203.0.113.5", 7401, True),
    link=LinkFacts(0.02, 100.0, 100.0),
    saves=DiskFacts("out", 10**12, ""),
    data=Data("data/prose", "", True),
    stage=None,
    device=Device("cpu", 64 * 2**30, "2.6 for CPUs", 0, ""),
    wanted="auto",
)


def finding(about: str, **changes: Any) -> Finding:
    [each] = [each for each in findings(replace(WELL, **changes)) if each.about == about]
    return each


@pytest.mark.parametrize(
    ("registry", "verdict"), [(5, Grade.OK), (UnknownFact("it doesn't answer"), Grade.WARNING)]
)
def test_a_proxy_that_is_set_is_said_not_to_be_used(registry: Any, verdict: Grade) -> None:
    set_here = proxies(
        {"HTTPS_PROXY": "http://me:secret@proxy:3128", "http_proxy": "", "PATH": "/"}
    )
    result = finding("proxy", proxies=set_here, registry_protocol=registry)
    assert result.verdict is verdict
    assert result.description.startswith("a proxy is set (HTTPS_PROXY), and gRPC")
    assert ("VPN" in result.remedy) == (verdict is Grade.WARNING)
    assert proxies({"no_proxy": "*", "http_proxy": ""}) == ""


def test_a_machine_that_is_well_has_ten_good_findings() -> None:
    all_found = findings(WELL)
    assert [each.verdict for each in all_found] == [Grade.OK] * 10
    assert worst_grade(all_found) is Grade.OK
    assert not [each for each in all_found if each.remedy]


def test_of_code_it_is_said_whether_it_may_be_loaded() -> None:
    own = override(RUN, model__module="gpt2:build")
    refused = finding("code", run=own)
    assert refused.verdict is Grade.PROBLEM
    assert "start the node with --allow-module gpt2:build" in refused.description
    assert finding("code", run=own, allow_module="gpt2:build").verdict is Grade.OK


def test_the_requested_stage_is_what_needs_memory() -> None:
    uneven = override(RUN, model__stages=(1, RUN.model.config.layers - 1))
    needs = [
        COMPUTED * uneven.config.bytes_of(stage) + saved_bytes(uneven, uneven.config, stage)
        for stage in range(3)
    ]
    between = Device("cpu", int(2 * needs[1]), "2.6", 0, "")
    assert needs[1] < needs[2]
    for stage, verdict in ((1, OK), (2, P), (None, P), (9, P)):
        assert finding("memory", run=uneven, stage=stage, device=between).verdict is verdict


def test_the_exit_status_is_by_the_worst() -> None:
    plain = findings(replace(WELL, tls=False))
    assert worst_grade(plain) == 1
    full = findings(replace(WELL, tls=False, saves=DiskFacts("out", 0, "")))
    assert worst_grade(full) == 2


P, W, OK = Grade.PROBLEM, Grade.WARNING, Grade.OK
TWO_MINUTES, TEN_MINUTES = Clock(-120.0, 0.1), Clock(600.0, 0.1)
GPU = "H100, driver 550"
SELF = DialledBack("::1", 7401, False)


@pytest.mark.parametrize(
    ("about", "changes", "verdict", "says"),
    [
        ("version", {"protocol": 4}, P, "this machine's planaria is the older one"),
        ("version", {"registry_protocol": 4}, P, "the registry's planaria is the older one"),
        ("version", {"run": UnknownFact("what is foo?")}, P, "the registry's run file: what is"),
        ("registry", {"registry_protocol": UnknownFact("nobody there")}, P, "nobody there"),
        ("clock", {"clock": TWO_MINUTES}, W, "120.0 s behind the registry's"),
        ("clock", {"clock": TEN_MINUTES}, P, "certificates may not be valid"),
        ("clock", {"clock": TEN_MINUTES, "tls": False}, W, "logs can't be compared"),
        ("clock", {"clock": Clock(2.4, 1.0)}, OK, "2.4 s ahead of"),
        ("TLS", {"tls": False}, W, "--tls-ca, --tls-cert and --tls-key"),
        ("TLS", {"tls": False, "loopback": True}, OK, "none is needed on one machine"),
        ("port", {"port": UnknownFact("in use", P)}, P, "in use"),
        ("port", {"port": ""}, OK, "only dials out"),
        ("reachable", {"port": ""}, OK, "a third relays"),
        ("reachable", {"port": UnknownFact("in use", P)}, W, "nothing can listen here"),
        ("reachable", {"back": DialledBack("203.0.113.5", 7401, None)}, P, "open the port"),
        ("reachable", {"back": DialledBack("203.0.113.5", 7401, False)}, P, "--advertise none"),
        ("reachable", {"advertise": ("a.org:7401", ("203.0.113.5",))}, OK, "reaches this machine"),
        ("reachable", {"advertise": ("a.org:7401", ("10.0.0.1",))}, W, "advertise 203.0.113.5"),
        ("reachable", {"advertise": ("a.org:7401", ())}, W, "no address that can be looked up"),
        ("reachable", {"back": SELF}, W, "can't test whether others reach 0.0.0.0:7401"),
        ("reachable", {"back": SELF, "port": "127.0.0.1:7401"}, OK, "on one machine"),
        ("bandwidth", {"link": LinkFacts(0.02, 0.5, 100.0)}, W, "fewer bytes"),
        ("bandwidth", {"tokens_per_second": 1e6}, W, "the others would wait"),
        ("bandwidth", {"tokens_per_second": 1.0}, OK, "in a step take"),
        ("disk", {"saves": DiskFacts("out", 10**12, "Read-only file system")}, P, "Read-only"),
        ("disk", {"saves": DiskFacts("out", 2**20, "")}, P, "--save-dir"),
        ("disk", {"saves": DiskFacts("out", int(6 * 12 * BODY * 1.5), "")}, W, "saves.keep"),
        ("disk", {"saves": DiskFacts("out", int(FIRST * 151), ""), "stage": 0}, OK, "6 saves"),
        ("data", {"data": Data("d", "d is other data", True)}, W, "d is other data"),
        ("data", {"data": Data("d", "no data at d", False)}, OK, "needed at stage 0 only"),
        ("data", {"data": Data("d", "no data at d", False), "stage": 0}, P, "--data DIR"),
        ("data", {"data": Data("d", "no data at d", False, named=True)}, P, "no data at d"),
        ("device", {"wanted": "cuda:1"}, P, "sees 0 GPUs; the system knows of no NVIDIA driver"),
        ("device", {"device": Device("cpu", 1 << 40, "2.6", 0, GPU)}, W, "doesn't see it"),
        ("device", {"device": Device("cpu", 1 << 40, "2.6", 0, GPU), "wanted": "cpu"}, OK, "H100"),
        ("device", {"device": Device("cuda:0", 1 << 40, "2.6", 1, GPU)}, OK, "driver 550"),
        ("device", {"device": UnknownFact("it hangs")}, W, "it hangs"),
        ("memory", {"device": Device("cpu", NEEDED_BODY - 1, "2.6", 0, "")}, P, "model.stages"),
        ("memory", {"device": Device("cpu", NEEDED_BODY + 1, "2.6", 0, "")}, W, "more than half"),
        (
            "memory",
            {"device": Device("cpu", 2 * NEEDED_FIRST, "2.6", 0, ""), "stage": 0},
            OK,
            "a stage",
        ),
    ],
)
def test_each_finding(about: str, changes: dict[str, Any], verdict: Grade, says: str) -> None:
    result = finding(about, **changes)
    assert result.verdict is verdict, result
    assert says in f"{result.description} {result.remedy}"
    if verdict is P and not isinstance(changes.get(about, ""), UnknownFact):
        assert result.remedy or about in ("registry", "port")


def test_what_is_not_known_is_said_of_every_check() -> None:
    names = ("registry_protocol", "run", "clock", "port", "back", "link", "saves", "data", "device")
    nothing = findings(replace(WELL, **dict.fromkeys(names, UnknownFact("lost"))))  # type: ignore[arg-type]
    assert len(nothing) == 10
    assert all(each.verdict is not Grade.OK for each in nothing)


def test_lossy_codecs_and_replicas_change_what_a_step_sends() -> None:
    crossing = 16 * 512 * 512
    assert bytes_a_step(RUN) == 4 * crossing
    half = loads("[model]\npreset='small'\nvocabulary=2048\n[wire]\nactivations='none'\n")
    assert bytes_a_step(half) == 6 * crossing
    narrow = override(RUN, model__subspace=64, wire__activations="int8")
    assert bytes_a_step(narrow) == 16 * 512 * (64 + 64 / 256 * 4 + 3 + 2 * 64)
    two = loads("[model]\npreset='small'\nvocabulary=2048\n[swarm]\nreplicas=2\n")
    assert bytes_a_step(two) == 2 * crossing + 4 * max(FIRST, BODY)
    with_twins = override(RUN, recovery__policy="redundant")
    assert bytes_a_step(with_twins) == 4 * crossing + 4 * max(FIRST, BODY)
    low = override(two, wire__averaging="lowrank", wire__rank=4)
    summed = bytes_a_step(low) - 2 * crossing
    assert 4 * max(FIRST, BODY) / 400 < summed < 4 * max(FIRST, BODY) / 200


def test_a_finding_is_one_line() -> None:
    [(about, verdict, text)] = finding_lines(
        [Finding(Grade.PROBLEM, "it is full", "free space", "disk")]
    )
    assert (about, verdict, text) == ("disk", "problem", "it is full. Free space")
