"""Diagnosis of `planaria doctor`: facts in, findings out. This module uses no clock, disk or
network."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from planaria.bootstrap.address import Address
from planaria.bootstrap.address_probe import NO_PROXY
from planaria.node.averaging.coding import gradient_bytes
from planaria.node.launch.begin import check_module
from planaria.node.launch.errors import NodeError
from planaria.node.model.shape import COMPUTED, VALUE, ModelConfig, trained_shapes
from planaria.node.run_file import RunFile
from planaria.node.stage.activations import saved_bytes
from planaria.node.wire.frame_format import crossing_bytes

CLOCKS_DIFFER, CERTIFICATES_FAIL = 2.0, 300.0
"""Seconds between two clocks from which logs of several machines are hard to compare, and from
which a new certificate may not be valid yet."""
SLOW_STEP = 60.0
"""Seconds per step for transfers, if the run has no step time yet."""
SPARE = 2.0
"""Minimum ratio of a disk's free space to a node's saves."""


class Grade(enum.IntEnum):
    """Grade of a finding; the worst is the command's exit status."""

    OK = 0
    WARNING = 1
    PROBLEM = 2


class Finding(NamedTuple):
    verdict: Grade
    description: str
    remedy: str = ""
    about: str = ""


class UnknownFact(NamedTuple):
    """A fact of the diagnosis that could not be determined."""

    why: str
    verdict: Grade = Grade.WARNING


class Clock(NamedTuple):
    ahead: float  # seconds of this machine's clock ahead of the registry's
    rtt: float  # seconds of the request


class DialledBack(NamedTuple):
    host: str  # this machine's address as the registry sees it
    port: int
    reached: bool | None  # None: no answer


class LinkFacts(NamedTuple):
    """Link between this machine and the registry's."""

    rtt: float  # seconds
    up: float  # Mbit/s
    down: float


class DiskFacts(NamedTuple):
    folder: str
    free: int  # bytes
    unwritable: str  # reason; empty: it can be written


class Data(NamedTuple):
    path: str
    problem: str  # empty: it is the run's
    exists: bool
    named: bool = False  # by --data: a node that can't use it doesn't start


class Device(NamedTuple):
    """The device of a node on this machine."""

    name: str  # PyTorch's name: cpu, cuda:0, mps:0, xpu:0
    memory: int  # bytes
    torch: str  # version, with its target
    gpus: int  # visible to PyTorch
    driver: str  # name of the GPU, and its driver if it is NVIDIA's; empty: unknown
    computes: str = "float32"  # dtypes


@dataclass(frozen=True)
class Facts:
    """All facts of the diagnosis, each known or with the reason why not."""

    version: str  # of this planaria
    protocol: int  # its protocol version
    registry_protocol: int | UnknownFact
    run: RunFile | UnknownFact  # resolved
    tokens_per_second: float  # of the run; 0: not training, or unknown
    tls: bool
    loopback: bool  # the registry is on this machine
    clock: Clock | UnknownFact
    port: str | UnknownFact  # where this machine listens; empty: a node would dial out only
    advertise: tuple[str, tuple[str, ...]] | None  # HOST:PORT, and the host's addresses
    back: DialledBack | UnknownFact
    link: LinkFacts | UnknownFact
    saves: DiskFacts | UnknownFact
    data: Data | UnknownFact
    stage: int | None  # requested one
    device: Device | UnknownFact
    wanted: str  # auto, or the requested device
    allow_module: str | None = None  # own architecture that may be loaded
    proxies: str = ""  # of the environment, in words


def findings(facts: Facts) -> list[Finding]:
    """The findings of all checks, in the order of repair."""
    results = ((about, check(facts)) for about, check in CHECKS.items())
    return [finding._replace(about=about) for about, finding in results if finding is not None]


def worst_grade(all_findings: Iterable[Finding]) -> Grade:
    return max((finding.verdict for finding in all_findings), default=Grade.OK)


def _unknown(fact: UnknownFact) -> Finding:
    return Finding(fact.verdict, f"could not be determined: {fact.why}")


def _registry(facts: Facts) -> Finding | None:
    theirs = facts.registry_protocol
    return Finding(Grade.PROBLEM, theirs.why) if isinstance(theirs, UnknownFact) else None


def _version(facts: Facts) -> Finding | None:
    ours, theirs = facts.protocol, facts.registry_protocol
    if isinstance(theirs, UnknownFact):
        return None
    if ours != theirs:
        older = "this machine's" if ours < theirs else "the registry's"
        return Finding(
            Grade.PROBLEM,
            f"planaria {facts.version} speaks protocol {ours}, the registry protocol {theirs}",
            f"{older} planaria is the older one: install the same version on both",
        )
    if isinstance(facts.run, UnknownFact):
        return Finding(
            Grade.PROBLEM,
            f"planaria {facts.version} can't read the registry's run file: {facts.run.why}",
            "install the same version on both",
        )
    return Finding(Grade.OK, f"planaria {facts.version}, protocol {ours} on both")


def _clock(facts: Facts) -> Finding:
    if isinstance(facts.clock, UnknownFact):
        return _unknown(facts.clock)
    ahead, rtt = facts.clock
    apart = max(0.0, abs(ahead) - rtt / 2)
    which = "ahead of" if ahead > 0 else "behind"
    description = f"{abs(ahead):.1f} s {which} the registry's, give or take {rtt / 2:.2g} s"
    if apart < CLOCKS_DIFFER:
        return Finding(Grade.OK, description)
    remedy = "set it from the network: timedatectl set-ntp true, chrony or the like"
    if apart >= CERTIFICATES_FAIL and facts.tls:
        return Finding(Grade.PROBLEM, f"{description}: certificates may not be valid", remedy)
    return Finding(Grade.WARNING, f"{description}: logs can't be compared", remedy)


def _tls(facts: Facts) -> Finding:
    if isinstance(facts.registry_protocol, UnknownFact):
        return _unknown(UnknownFact("there is no registry"))
    if facts.tls:
        return Finding(Grade.OK, "the registry and this machine have verified each other")
    if facts.loopback:
        return Finding(Grade.OK, "none, and none is needed on one machine")
    return Finding(
        Grade.WARNING,
        "none: anyone on the network path can read and change what is sent",
        "fine in a network that you trust, with --insecure; else give --tls-ca, --tls-cert and "
        "--tls-key to the registry and every node",
    )


def _proxy(facts: Facts) -> Finding | None:
    """The finding about proxies in the environment, if any."""
    if facts.proxies and not isinstance(facts.registry_protocol, UnknownFact):
        return Finding(Grade.OK, f"{facts.proxies}; the registry is reached directly")
    return Finding(Grade.WARNING, facts.proxies, NO_PROXY) if facts.proxies else None


def _port(facts: Facts) -> Finding:
    if isinstance(facts.port, UnknownFact):
        return Finding(Grade.PROBLEM, facts.port.why)
    if not facts.port:
        return Finding(Grade.OK, "none is needed: this node only dials out")
    return Finding(Grade.OK, f"{facts.port} is free to listen on")


def _reachable(facts: Facts) -> Finding:
    back = facts.back
    if facts.port == "":
        return Finding(
            Grade.OK, "not needed: this node only dials out; between two such nodes, a third relays"
        )
    if isinstance(facts.port, UnknownFact):
        return _unknown(UnknownFact("nothing can listen here"))
    if isinstance(back, UnknownFact):
        return _unknown(back)
    if Address(back.host, back.port).is_loopback:
        return _on_one_machine(facts.port)
    at = f"{back.host} port {back.port}"
    if back.reached:
        elsewhere = _elsewhere(facts, back)
        return elsewhere or Finding(Grade.OK, f"the registry reaches this machine at {at}")
    says = "doesn't answer" if back.reached is None else "refuses, or has another server"
    return Finding(
        Grade.PROBLEM,
        f"the registry sees this machine as {back.host}, and {at} {says}",
        f"listen on all addresses (--listen 0.0.0.0:{back.port}), open the port in firewall and "
        "router, or forward one and name it with --advertise HOST:PORT; or dial out only: "
        "--advertise none",
    )


def _on_one_machine(listens: str) -> Finding:
    """The finding for a registry on this machine: it can't test reachability from others."""
    if Address.parse(listens).is_loopback:
        description = (
            f"registry and node are on one machine, and only nodes on it can dial {listens}"
        )
        return Finding(Grade.OK, description)
    return Finding(
        Grade.WARNING,
        f"the registry is on this machine, so it can't test whether others reach {listens}",
        "run planaria doctor on another machine, and open the port in the firewall",
    )


def _elsewhere(facts: Facts, back: DialledBack) -> Finding | None:
    """The finding for another advertised address: the registry can't test it."""
    if facts.advertise is None or back.host in facts.advertise[1]:
        return None
    advertised, hosts = facts.advertise
    resolved = ", ".join(hosts) or "no address that can be looked up here"
    return Finding(
        Grade.WARNING,
        f"the registry reaches this machine at {back.host}; --advertise {advertised} resolves "
        f"to {resolved}, which was not tested",
        f"advertise {back.host}, unless a tunnel or a proxy forwards the other address here",
    )


def _bandwidth(facts: Facts) -> Finding:
    if isinstance(facts.link, UnknownFact):
        return _unknown(facts.link)
    rtt, up, down = facts.link
    description = (
        f"{up:.0f} Mbit/s to the registry, {down:.0f} from it, {rtt * 1e3:.0f} ms round trip"
    )
    if isinstance(facts.run, UnknownFact):
        return _unknown(UnknownFact(f"{description}; the run file can't be read"))
    run, config = facts.run, facts.run.model.config
    size = bytes_a_step(run)
    seconds = size * 8e-6 / min(up, down)
    description += f"; the {size / 1e6:.3g} MB that a node sends in a step take {seconds:.2g} s"
    remedy = "send fewer bytes (int8 in the run file's [wire]), or use a faster link"
    if facts.tokens_per_second:
        step = run.training.batch * config.context / facts.tokens_per_second
        if seconds > step:
            description += f", and a step takes {step:.2g} s: the others would wait"
            return Finding(Grade.WARNING, description, remedy)
    elif seconds > SLOW_STEP:
        return Finding(Grade.WARNING, description, remedy)
    return Finding(Grade.OK, description)


def bytes_a_step(run: RunFile) -> float:
    """Bytes that a body stage's node sends per step, with the initial number of replicas: two
    boundaries' tensors, its part of the stage's gradient, which each replica sends twice, and the
    gradient for a twin."""
    config, training, replicas = run.config, run.training, run.swarm.replicas
    tokens = round(training.batch / replicas * config.context)
    boundaries = sum(crossing_bytes(config, tokens, run.wire))
    share = 2 * (replicas - 1) / replicas
    shapes = [trained_shapes(config, stage).values() for stage in range(config.stages + 1)]
    twin = VALUE * max(config.trained) if run.policy.twins else 0
    return boundaries + twin + share * max(gradient_bytes(run.wire, of, replicas) for of in shapes)


def _disk(facts: Facts) -> Finding:
    if isinstance(facts.saves, UnknownFact):
        return _unknown(facts.saves)
    folder, free, unwritable = facts.saves
    if unwritable:
        return Finding(
            Grade.PROBLEM,
            f"{folder} can't be written: {unwritable}",
            "let this user write there, or name another folder with --save-dir",
        )
    if isinstance(facts.run, UnknownFact):
        return _unknown(UnknownFact(f"{_gib(free)} free; the run file can't be read"))
    run = facts.run
    saves = run.saves.keep + run.saves.in_flight
    needed = saves * _stage_figure(facts, run.config, run.config.state_bytes)
    description = f"{_gib(free)} free in {folder}, and {saves} saves of a stage take {_gib(needed)}"
    remedy = "free space, name another disk with --save-dir, or keep fewer (saves.keep)"
    if free < needed:
        return Finding(Grade.PROBLEM, description, remedy)
    verdict = Grade.OK if free >= SPARE * needed else Grade.WARNING
    return Finding(verdict, description, remedy if verdict else "")


def _data(facts: Facts) -> Finding:
    if isinstance(facts.data, UnknownFact):
        return _unknown(facts.data)
    path, problem, exists, named = facts.data
    needed = facts.stage == 0 or named
    if not problem:
        return Finding(Grade.OK, f"{path} has the run's data: this node can serve stage 0")
    if needed or exists:
        verdict = Grade.PROBLEM if needed else Grade.WARNING
        return Finding(verdict, problem, "name the run's prepared data by --data DIR|URL")
    return Finding(Grade.OK, f"none at {path}: it is needed at stage 0 only")


def _code(facts: Facts) -> Finding | None:
    """The finding about a run's own architecture, if it has one."""
    if isinstance(facts.run, UnknownFact) or facts.run.model.module is None:
        return None
    try:
        check_module(facts.run, facts.allow_module)
    except NodeError as error:
        return Finding(Grade.PROBLEM, str(error))
    return Finding(Grade.OK, f"{facts.allow_module} may be loaded; loading it was not tested")


def _device(facts: Facts) -> Finding:
    device = facts.device
    if isinstance(device, UnknownFact):
        return _unknown(device)
    description = f"{device.name}, PyTorch {device.torch}, {device.computes}"
    if device.driver:
        description += f"; {device.driver}"
    on_gpu = device.name != "cpu"
    if not on_gpu and facts.wanted not in ("auto", "cpu"):
        return Finding(
            Grade.PROBLEM,
            f"--device {facts.wanted}: PyTorch {device.torch} sees {device.gpus} GPUs; "
            + (device.driver or "the system knows of no NVIDIA driver"),
            "check nvidia-smi, install a PyTorch that is built for the driver, or use cpu",
        )
    if device.driver and not on_gpu and facts.wanted == "auto":
        return Finding(
            Grade.WARNING,
            f"{description}: there is a GPU, but PyTorch doesn't see it",
            "install a PyTorch that is built for this driver's CUDA",
        )
    return Finding(Grade.OK, description)


def _memory(facts: Facts) -> Finding:
    if isinstance(facts.device, UnknownFact):
        return _unknown(UnknownFact("there is no device"))
    if isinstance(facts.run, UnknownFact):
        return _unknown(UnknownFact("the run's model isn't known"))
    run, config = facts.run, facts.run.config
    needed = _stage_figure(
        facts,
        config,
        lambda stage: round(COMPUTED * config.bytes_of(stage)) + saved_bytes(run, config, stage),
    )
    description = (
        f"{_gib(facts.device.memory)} on {facts.device.name}, and a stage with a microbatch takes "
        f"{_gib(needed)}"
    )
    remedy = (
        "use a machine with more memory, or have the run's operator choose more model.stages or a "
        "smaller training.microbatch"
    )
    if needed > facts.device.memory:
        return Finding(Grade.PROBLEM, description, remedy)
    if needed > facts.device.memory / 2:
        return Finding(Grade.WARNING, f"{description}: more than half of it", remedy)
    return Finding(Grade.OK, description)


CHECKS: Final[Mapping[str, Callable[[Facts], Finding | None]]] = {
    "registry": _registry,
    "version": _version,
    "clock": _clock,
    "TLS": _tls,
    "proxy": _proxy,
    "port": _port,
    "reachable": _reachable,
    "bandwidth": _bandwidth,
    "disk": _disk,
    "data": _data,
    "code": _code,
    "device": _device,
    "memory": _memory,
}
"""The checks, by what they are about, in the order of repair."""


def _stage_figure(facts: Facts, config: ModelConfig, figure: Callable[[int], int]) -> int:
    """The figure of the requested stage; the largest stage's if the run has none such."""
    sizes = [figure(stage) for stage in range(config.stages + 1)]
    return max(sizes) if (stage := facts.stage) is None else max(sizes[stage : stage + 1] or sizes)


def _gib(size: float) -> str:
    return f"{size / 2**30:.3g} GiB"


def finding_lines(all_findings: Iterable[Finding]) -> Iterator[tuple[str, str, str]]:
    """Subject, verdict, and text of each finding, to print."""
    for finding in all_findings:
        remedy = f". {finding.remedy[:1].upper()}{finding.remedy[1:]}" if finding.remedy else ""
        yield finding.about, finding.verdict.name.lower(), f"{finding.description}{remedy}"
