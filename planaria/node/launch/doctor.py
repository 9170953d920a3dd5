"""`planaria doctor`: determines facts about this machine and its connection to a run's registry,
before a node is started. diagnosis.py interprets them.

Each request has its own deadline, and independent ones run concurrently.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from planaria.bootstrap.address import Address
from planaria.bootstrap.address_probe import NOBODY, probe_all, proxies, why_unreachable
from planaria.bootstrap.client import JoinRefused, RegistryClient, RegistryUnreachable
from planaria.bootstrap.credentials import Credentials, CredentialsError
from planaria.bootstrap.grpc_transport import GrpcTransport
from planaria.bootstrap.registry_pb2 import Description, ExamineRequest
from planaria.bootstrap.rules import PROTOCOL
from planaria.node.data.corpus import CorpusError
from planaria.node.data.mixture import corpus_folders, find_by_content, index_of
from planaria.node.data.remote_corpus import local_folder_of
from planaria.node.launch.begin import check_reachable
from planaria.node.launch.diagnosis import (
    Clock,
    Data,
    Device,
    DialledBack,
    DiskFacts,
    Facts,
    Grade,
    LinkFacts,
    UnknownFact,
)
from planaria.node.launch.errors import NodeError
from planaria.node.launch.own_folders import data_below, own_folder
from planaria.node.report.run_state import RunState
from planaria.node.run_file import RunFile, RunFileError, loads

if TYPE_CHECKING:
    from planaria.node.launch.node_options import Addresses, DoctorOptions

PROBE, DESCRIBE, DIAL, MEASURE, LOOK = 3.0, 3.0, 5.5, 5.5, 5.0
"""Deadlines in seconds: reachability probe, then description of the run; then, concurrently,
dialling back and measurement; access to a disk."""
IN_ALL: Final = 14.0
"""Seconds from the process's start for the device, concurrently."""
FIRST_LOAD, LOAD = 1 << 18, 1 << 22
"""Bytes of a link measurement: the larger load only if the smaller took at most QUICK seconds."""
QUICK: Final = 0.5
QUESTIONS = 4  # the quickest answer gives time and delay

SEE_DEVICE = """
import json, sys, torch
from planaria.node.machine.device import accelerators, find_device, memory_of, why_no_bf16
from planaria.recovery.identical_arithmetic import is_exact

device, gpus = find_device(sys.argv[1]) or torch.device("cpu"), len(accelerators())
kinds = {"cuda": "CUDA", "hip": "ROCm", "xpu": "XPU"}
versions = {kinds[name]: getattr(torch.version, name, None) for name in kinds}
built = [f"{kind} {version}" for kind, version in versions.items() if version]
made_for = "".join(built) or device.type.upper()
computes = f"float32 and {'no ' if why_no_bf16(device) else ''}bf16"
computes += "" if is_exact(device) else ", updates on the CPU"
name = getattr(torch.get_device_module(device), "get_device_name", lambda device: "")(device)
made = f"{torch.__version__} for {made_for}"
print(json.dumps([str(device), memory_of(device), made, gpus, name, computes]))
"""
"""Script of a separate process: torch takes seconds to load, and a broken driver may hang."""

T = TypeVar("T")


class Examined(NamedTuple):
    """Options of `planaria doctor`, and what follows from them."""

    options: DoctorOptions
    addresses: Addresses
    credentials: Credentials


class Port(NamedTuple):
    """Port where this machine listens for the registry to dial back."""

    name: str  # of the health service
    number: int
    fact: str | UnknownFact


async def gather_facts(examined: Examined, version: str, elapsed: float = 0.0) -> Facts:
    """Determine all facts; `elapsed`: seconds since the process began. Raises AddressError."""
    options, addresses = examined.options, examined.addresses
    device = _device_facts(options.device)
    device_task = asyncio.create_task(_in_time("PyTorch", max(0.0, IN_ALL - elapsed), device))
    disk_task = asyncio.create_task(
        _in_time("the disk", LOOK, _in_thread(_disk_facts, options.save_dir))
    )
    client = RegistryClient(addresses.registries, examined.credentials)
    try:
        async with _listening(examined) as port:
            described = await _describe(client, examined)
            run = _run_of(described)
            back: DialledBack | UnknownFact = UnknownFact("no registry answers")
            clock: Clock | UnknownFact = UnknownFact("no registry answers")
            link: LinkFacts | UnknownFact = UnknownFact("no registry answers")
            if not isinstance(described, UnknownFact):
                asked = _dial_back(client, examined, port), _measure(client)
                back, (clock, link) = await asyncio.gather(*asked)
        data: Data | UnknownFact = UnknownFact("the run's data isn't known")
        if isinstance(run, RunFile):
            reading = _in_thread(_data_facts, options.data or (), run)
            data = await _in_time("the data", LOOK, reading)
        return Facts(
            version=version,
            protocol=PROTOCOL,
            registry_protocol=described
            if isinstance(described, UnknownFact)
            else described.protocol,
            run=run,
            tokens_per_second=RunState(
                Description() if isinstance(described, UnknownFact) else described
            ).tokens_per_second,
            tls=examined.credentials.channel is not None,
            loopback=all(Address.parse(address).is_loopback for address in addresses.registries),
            clock=clock,
            port=port.fact,
            advertise=_advertised(examined),
            back=back,
            link=link,
            saves=await disk_task,
            data=data,
            stage=options.stage,
            device=await device_task,
            wanted=options.device,
            allow_module=options.allow_module,
            proxies=proxies(os.environ),
        )
    finally:
        for task in (device_task, disk_task):
            task.cancel()
        await asyncio.gather(device_task, disk_task, return_exceptions=True)
        await client.close()


async def _in_time(
    subject: str, seconds: float, work: Coroutine[object, object, T | UnknownFact]
) -> T | UnknownFact:
    try:
        return await asyncio.wait_for(work, seconds)
    except TimeoutError:
        return UnknownFact(f"{subject} has not answered in {seconds:.3g} s")


async def _in_thread(work: Callable[..., T], *arguments: object) -> T | UnknownFact:
    """Run `work` in a daemon thread: a hanging disk must not delay the process's end."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T | UnknownFact] = loop.create_future()

    def settle(result: T | UnknownFact) -> None:
        if not done.done():
            done.set_result(result)

    def run() -> None:
        result: T | UnknownFact
        try:
            result = work(*arguments)
        except OSError as error:
            result = UnknownFact(str(error), Grade.PROBLEM)
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, result)

    threading.Thread(target=run, daemon=True).start()
    return await done


# -- the registry ----------------------------------------------------------------------------------


async def _describe(client: RegistryClient, examined: Examined) -> Description | UnknownFact:
    answers = await probe_all(examined.addresses.registries, PROBE)
    if why := why_unreachable(answers, NOBODY):
        return UnknownFact(why, Grade.PROBLEM)
    try:
        async with asyncio.timeout(DESCRIBE):
            await client.check_one_run(DESCRIBE / 2)
            return await client.describe(DESCRIBE / 2)
    except TimeoutError:
        why = f"the registry has not answered in {DESCRIBE:g} s"
    except (JoinRefused, RegistryUnreachable) as error:
        why = str(error)
    return UnknownFact(why, Grade.PROBLEM)


def _run_of(described: Description | UnknownFact) -> RunFile | UnknownFact:
    if isinstance(described, UnknownFact):
        return described
    try:
        return loads(described.run_file, "the registry's run file")
    except RunFileError as error:
        return UnknownFact(str(error))


@asynccontextmanager
async def _listening(examined: Examined) -> AsyncIterator[Port]:
    """Serve health where a node would listen, under a unique name, to be dialled back."""
    name = f"doctor-{secrets.token_hex(8)}"
    if examined.addresses.dials_only:
        yield Port(name, 0, "")
        return
    server = GrpcTransport(examined.credentials, insecure=examined.options.insecure)
    try:
        check_reachable(examined.addresses)
        number = await server.serve(str(examined.addresses.listen), {}, [name])
    except (NodeError, CredentialsError, OSError) as error:
        yield Port(name, 0, UnknownFact(str(error), Grade.PROBLEM))
        return
    try:
        yield Port(name, number, str(examined.addresses.listen._replace(port=number)))
    finally:
        await server.stop(0)


async def _dial_back(
    client: RegistryClient, examined: Examined, port: Port
) -> DialledBack | UnknownFact:
    if not port.number:
        return UnknownFact("this machine can't listen on a port")
    number = examined.addresses.advertise.port if examined.addresses.advertise else port.number
    try:
        reply = await client.examine(ExamineRequest(name=port.name, port=number), DIAL)
    except (JoinRefused, RegistryUnreachable) as error:
        return UnknownFact(str(error))
    reached = reply.there if reply.HasField("there") else None
    return DialledBack(reply.host, number, reached)


async def _measure(client: RegistryClient) -> tuple[Clock | UnknownFact, LinkFacts | UnknownFact]:
    clock: Clock | UnknownFact = UnknownFact("the registry has not answered in time")
    link: LinkFacts | UnknownFact = UnknownFact(
        f"{FIRST_LOAD} bytes took more than {MEASURE:g} s: too slow"
    )
    try:
        async with asyncio.timeout(MEASURE):
            clock = min([await _ask_time(client) for _ in range(QUESTIONS)], key=lambda c: c.rtt)
            up = await _link_rate(client, clock.rtt, lambda size: ExamineRequest(load=bytes(size)))
            down = await _link_rate(client, clock.rtt, lambda size: ExamineRequest(wanted=size))
            link = LinkFacts(clock.rtt, up, down)
    except TimeoutError:
        pass
    except (JoinRefused, RegistryUnreachable) as error:
        link = UnknownFact(str(error))
        clock = clock if isinstance(clock, Clock) else link
    return clock, link


async def _ask_time(client: RegistryClient) -> Clock:
    sent, began = time.time(), time.perf_counter()
    reply = await client.examine(ExamineRequest(), MEASURE)
    rtt = time.perf_counter() - began
    return Clock(sent + rtt / 2 - reply.time, rtt)


async def _link_rate(
    client: RegistryClient, rtt: float, request: Callable[[int], ExamineRequest]
) -> float:
    """Measured rate of the link to the registry in Mbit/s."""
    for size in (FIRST_LOAD, LOAD):
        began = time.perf_counter()
        await client.examine(request(size), MEASURE)
        took = time.perf_counter() - began
        if took > QUICK:
            break
    return 8e-6 * size / max(took - rtt, took / 10)


def _advertised(examined: Examined) -> tuple[str, tuple[str, ...]] | None:
    """The HOST:PORT of --advertise, and the addresses that its name resolves to here."""
    if examined.addresses.advertise is None:
        return None
    hosts: tuple[str, ...] = ()
    with suppress(OSError, UnicodeError):
        addresses = socket.getaddrinfo(
            examined.addresses.advertise.host, None, type=socket.SOCK_STREAM
        )
        hosts = tuple(dict.fromkeys(str(address[0]) for *_, address in addresses))
    return str(examined.addresses.advertise), hosts


# -- this machine ----------------------------------------------------------------------------------


def _disk_facts(folder: Path) -> DiskFacts:
    """Facts of the disk with the nearest existing folder; none is created."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    unwritable = ""
    try:
        with NamedTemporaryFile(dir=existing, prefix=".planaria-"):
            pass
    except OSError as error:
        unwritable = error.strerror or str(error)
    return DiskFacts(str(folder), shutil.disk_usage(existing).free, unwritable)


def _data_facts(places: Sequence[str], run: RunFile) -> Data:
    named, places = bool(places), places or find_by_content(run.data)
    where, data = " with ".join(places) or run.data.where, run.data
    try:
        data = data if places else data_below(own_folder(None, run), data)
        with TemporaryDirectory(prefix="planaria-") as links:
            folders = [local_folder_of(place, Path(links)) for place in places]
            folder, index = corpus_folders(data, folders)[0], index_of(data, folders)
            problem = index.misfit(folder, data.content, run.model.vocabulary)
    except NodeError as error:
        return Data(where, str(error), False)
    except CorpusError as error:
        folders = list(map(Path, places)) or data.folders
        return Data(where, str(error), all(path.exists() for path in folders), named)
    return Data(where, problem and f"{where} {problem}", True, named)


async def _device_facts(wanted: str) -> Device | UnknownFact:
    seen, driver = await asyncio.gather(
        _command_output(sys.executable, "-c", SEE_DEVICE, wanted),
        _command_output(
            "nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"
        ),
    )
    try:
        name, memory, torch, gpus, gpu, computes = json.loads(seen)
    except ValueError:
        why = "PyTorch can't be loaded; `python -c 'import torch'` shows why"
        return UnknownFact(why, Grade.PROBLEM)
    first, _, _ = driver.partition("\n")
    parts = [part.strip() for part in first.split(",")]
    gpu_driver = f"{parts[0]}, driver {parts[1]}" if len(parts) == 3 else gpu
    return Device(name, memory, torch, gpus, gpu_driver, computes)


async def _command_output(*command: str) -> str:
    """Output of a command; empty if it is missing or fails."""
    pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    try:
        process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=null)
    except OSError:
        return ""
    try:
        output, _ = await process.communicate()
    except asyncio.CancelledError:
        with suppress(ProcessLookupError):  # it has just ended
            process.kill()
        raise
    return output.decode(errors="replace").strip() if process.returncode == 0 else ""
