"""`planaria node`: a process that joins, serves, and rejoins as a new node when it was dropped."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING

import torch

from planaria.bootstrap.address import Address, reach_by
from planaria.bootstrap.address_probe import way_out
from planaria.bootstrap.awaited_saves import CRASHED
from planaria.bootstrap.client import (
    InQuarantine,
    JoinRefused,
    RegistryClient,
    RegistryUnreachable,
)
from planaria.bootstrap.operator_orders import changes_in_force, order_in_words
from planaria.bootstrap.registry_pb2 import STOPPED, Description
from planaria.bootstrap.stop_signals import stop_signals
from planaria.node.daemon import DaemonMachine, DaemonNode
from planaria.node.data.corpus import CorpusError
from planaria.node.data.mixture import Data
from planaria.node.launch.advertised import (
    Advertised,
    forwarded_address,
    is_known_otherwise,
    own_address,
    unforwarded_port,
)
from planaria.node.launch.begin import Setup, check_writable
from planaria.node.launch.errors import NodeCrashed, NodeError
from planaria.node.launch.instance import Instance, find_instance, release_key
from planaria.node.launch.notices import Aws, Notice, ask_metadata, watch_notices
from planaria.node.launch.own_folders import checkpoint_dir, folder_below, own_folder
from planaria.node.launch.supervisor import Pauses
from planaria.node.machine.cores import available_cores
from planaria.node.machine.device import (
    accelerators,
    find_device,
    measure_speed,
    memory_of,
    why_no_bf16,
)
from planaria.node.model import learning_rate
from planaria.node.model.architecture import Architecture
from planaria.node.model.checkpoint import Checkpoint
from planaria.node.model.config import UnsupportedModelError
from planaria.node.model.shape import ModelConfig
from planaria.node.node import LocalRun, Node, NodePlace
from planaria.node.report.ledger import LedgerError
from planaria.node.report.unsaved import stage_names, unsaved_stages
from planaria.node.run_file import RunFile, dumps, loads
from planaria.node.stage.own_code import OwnCodeError, load_checked
from planaria.node.state.saves import saved_stages
from planaria.node.wire.seat_names import new_identity

if TYPE_CHECKING:
    from planaria.node.launch.node_options import Addresses
    from planaria.node.page.http_address import PageAddress
    from planaria.node.report.experiment import ExperimentPipe

log = logging.getLogger("planaria")

PATIENCE = 30.0  # seconds for a name service, as for the registry

LOOK = 5.0  # seconds to find the own address again

ASIDE = 1.0
"""Seconds for each of three answers of AWS's metadata service, which is in the same machine."""

RUN_FILE = "run.toml"
"""Run file of the saves beside it."""


class Departure:
    """A notice that this node must leave: by when, and why. Only the first one counts."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.noticed = asyncio.Event()
        self.deadline, self.why = 0.0, ""

    def tell(self, grace: float, why: str) -> None:
        """Gives notice that this node must leave: `grace` seconds are left."""
        if not self.noticed.is_set():
            self.deadline, self.why = self._loop.time() + grace, why
            self.noticed.set()

    @property
    def left(self) -> float:
        """Seconds left until this node must have left."""
        return max(0.0, self.deadline - self._loop.time())


async def serve(
    setup: Setup,
    client: RegistryClient,
    description: Description,
    run: RunFile,
    corpus: Data | None,
) -> int:
    """Serves the run of that description; see `begin`. Returns the exit status. Raises NodeError,
    NodeCrashed, RegistryUnreachable, JoinRefused."""
    options = setup.options
    device = pick_device(options.device)
    threads = options.threads or min(torch.get_num_threads(), available_cores())
    torch.set_num_threads(threads)
    instance, living, place = None, list[DaemonNode](), None
    stack = AsyncExitStack()
    try:
        folder = own_folder(options.out, run)
        if options.out is None:  # one folder for all nodes of a run here, so that it can be audited
            check_writable("--out", folder)
            log.info("event log and, at stage 0, ledger are written to %s", folder)
            options = replace(options, out=folder)
        instance = setup.instance or find_instance(options.saves or options.out)
        named = replace(setup, options=options, instance=instance)
        place, local = await prepare_place(named, folder, description, run, corpus, device)
        log.info("on SIGTERM this node leaves within %g s", options.grace)

        departure = Departure()
        loop = asyncio.get_running_loop()

        def signalled(stop: asyncio.Future[int]) -> None:
            departure.tell(options.grace, signal.Signals(stop.result()).name)

        stop_signals().add_done_callback(signalled)

        def noticed(notice: Notice) -> None:
            departure.tell(notice.grace(options.grace), notice.event)

        if options.cloud != "none":
            watch_notices(options.cloud, noticed)
        if options.track is not None:
            experiment = experiment_of(options.track, place, run, description)
            place = replace(place, experiment=experiment)
        if setup.metrics is not None:
            await stack.enter_async_context(serve_metrics(setup.metrics, description.run, living))
        pauses, was_member = Pauses(1.0, 30.0), False
        collect_often()
        while not departure.noticed.is_set():
            asking = ask_by_saves(place)
            node: DaemonNode = Node(new_identity(place.name), asking, local, client, DaemonMachine)
            living[:] = [node]
            began = loop.time()
            try:
                why = await _live_until(node, departure)
            except InQuarantine as refused:
                log.warning("%s; this node joins again after that", refused)
                with suppress(TimeoutError):
                    await asyncio.wait_for(departure.noticed.wait(), refused.seconds)
                continue
            except JoinRefused as refused:
                if await is_stopped(client):
                    break
                if was_member:  # so the options are right, and another process may be let in
                    raise RegistryUnreachable(str(refused)) from refused
                raise
            except (CorpusError, LedgerError):
                raise
            except (OSError, ValueError) as error:
                if node.view.number:
                    raise NodeCrashed(f"{type(error).__name__}: {error}") from error
                raise
            was_member = True
            if node.view.order == STOPPED:
                log.info("%s", order_in_words(node.view))
                break
            if departure.noticed.is_set():
                await check_saved(node, client)
                break
            if node.abandoned:
                raise NodeCrashed(
                    f"{node.abandoned}; only a new process helps: start it again, and check the "
                    "device if this happens again"
                )
            outdated = node.is_outdated
            log.log(
                logging.INFO if outdated else logging.WARNING,
                "%s; joining again as a new node",
                "the run has other settings" if outdated else why,
            )
            living.clear()
            del node
            gc.collect()  # else its stage would wait, beside the next one, for Python to look
            if outdated:
                description, tracked = await client.describe(), place.experiment
                run = loads(description.run_file, "the registry's run file")
                place, local = await prepare_place(named, folder, description, run, corpus, device)
                if tracked is not None:
                    tracked.tell({"run_file": description.run_file})
                place = replace(place, experiment=tracked)
                continue
            with suppress(TimeoutError):
                await asyncio.wait_for(departure.noticed.wait(), pauses.after(loop.time() - began))
            with suppress(TimeoutError, RegistryUnreachable):  # else the address stays as it was
                async with asyncio.timeout(LOOK):
                    place = await addressed(place, named)
        return 0
    finally:
        await stack.aclose()
        if place is not None and place.experiment is not None:
            await asyncio.to_thread(place.experiment.close)
        if instance is not None and setup.instance is None:
            release_key(instance)


async def prepare_place(
    setup: Setup,
    folder: Path,
    description: Description,
    run: RunFile,
    corpus: Data | None,
    device: torch.device,
) -> tuple[NodePlace, LocalRun]:
    """The node's place and its run, under the run's present settings. `setup`: with the node's
    instance; `folder`: its own. Raises NodeError, RegistryUnreachable."""
    options, instance = setup.options, setup.instance
    assert instance is not None
    if options.save_dir is None:
        saves = place_for_saves(folder / "saves", instance, description.run_file)
        options = replace(options, save_dir=saves)
    vocabulary = run.model.vocabulary or (corpus.vocabulary if corpus else None)
    if vocabulary is None:
        raise NodeError(
            "the run file has no model.vocabulary, which the registry should have added"
        )
    config = run.config_for(vocabulary)
    check_precision(run, device)
    own = find_own_code(run, config)
    room = options.seats or seats_that_fit(device, config)
    log.info("%s", learning_rate.describe_rate(run))
    if problem := learning_rate.warmup_too_long(run):
        log.warning("%s", problem)
    log.info("this node has room for %d seat%s", room, "" if room == 1 else "s")
    place = replace(
        await find_place(replace(setup, options=options), device),
        identity=instance.identity,
        room=room,
        reach=await reach_by(setup.addresses.registries),
        checkpoint=find_checkpoint(run, options.model, folder),
        checkpoint_dir=checkpoint_dir(run, folder, options.checkpoint_dir),
        own=own,
        speed=measure_speed(device),
    )
    changes = changes_in_force(description.view)
    return place, LocalRun(description.run, run, config, corpus, changes)


async def is_stopped(client: RegistryClient) -> bool:
    """Whether the run was stopped by its operator; then the log says so."""
    with suppress(RegistryUnreachable, JoinRefused):
        view = (await client.describe(deadline=1.0)).view
        if view.order == STOPPED:
            log.info("%s", order_in_words(view))
            return True
    return False


async def check_saved(node: DaemonNode, client: RegistryClient) -> None:
    """Checks that a finished run's last step isn't lost with this node, which has ended. Raises
    NodeError."""
    described = None
    if stages := node.unsaved():
        with suppress(RegistryUnreachable, JoinRefused):
            described = await client.describe(deadline=1.0)
    if lost := unsaved_stages(described, stages, node.run.steps):
        raise NodeError(
            f"the last step of {stage_names(lost)} was in memory only, and is lost with this node: "
            f"it was neither saved in {node.place.save_dir} nor exported, and no other node has "
            "reported a save of it"
        )


def check_precision(run: RunFile, device: torch.device) -> None:
    """Checks that the device can compute in the run's precision. Raises NodeError."""
    if run.training.precision == "bf16" and (why := why_no_bf16(device)):
        raise NodeError(
            f"training.precision = bf16: this machine can't compute in it ({why}). Unset "
            "ATEN_CPU_CAPABILITY if it is set; else train in float32"
        )


def find_checkpoint(run: RunFile, model: Path | None, folder: Path) -> Checkpoint | None:
    """The run's initial checkpoint, if it is in `model`, or where the run file says below this
    node's own `folder`; otherwise the node gets its weights from others. Raises NodeError when it
    is needed."""
    origin = run.model.origin
    if origin is None:
        if model is not None:
            raise NodeError(f"--model {model}: this run doesn't begin from a checkpoint; omit it")
        return None
    try:
        return Checkpoint.open(model or folder_below(folder, "model.from", origin, "--model"))
    except (NodeError, UnsupportedModelError) as error:
        if model is not None:
            raise NodeError(f"--model: {error}") from error
        to_first = run.policy.checkpoints and run.training.lora is None  # adapters begin anew
        if run.policy.twins or to_first:
            raise NodeError(
                f"with recovery.policy = {run.recovery.policy} each node needs the checkpoint "
                f"that the run begins from, and {error} (name its folder with --model DIR)"
            ) from error
        log.info("this node gets its first weights from other nodes: %s", error)
        return None


def find_own_code(run: RunFile, config: ModelConfig) -> Architecture | None:
    """What the code of a run's own architecture builds here; `begin` has checked that it may be
    loaded. Raises NodeError when it can't be, or differs from the others'."""
    if config.own is None:
        return None
    try:
        return load_checked(run, config)
    except OwnCodeError as error:
        key = "parts" if config.own.decoder else "module"
        raise NodeError(f"model.{key}: {error}") from error


def experiment_of(
    kind: str, place: NodePlace, run: RunFile, description: Description
) -> ExperimentPipe:
    """The run's external record, beside its event log."""
    from planaria.node.report.experiment import ExperimentPipe, Opening

    name, folder = place.name or "node", str(place.out or Path("out"))
    opening = Opening(kind, name, description.run, dumps(run), folder)
    return ExperimentPipe(opening)


def serve_metrics(
    place: PageAddress, run: str, living: Sequence[DaemonNode]
) -> AbstractAsyncContextManager[None]:
    """Serves the metrics of the node that is living meanwhile. Raises OSError."""
    from planaria.node.page.metrics import exposition, node_points
    from planaria.node.page.serving import metrics_beside

    async def figures() -> bytes:
        samples = (
            node_points(node.node, node.make_report(), node.machine.wall.report())
            for node in living
        )
        return exposition(run, chain.from_iterable(samples))

    return metrics_beside(place, figures)


def collect_often() -> None:
    """Collects unused cycles when a quarter as many objects have come as the last collection found
    in use. Excludes the program's own 200,000 objects. Otherwise remains of broken connections
    would wait for 50,000 more, and a collection take a tenth of a second."""
    gc.collect()
    gc.freeze()
    gc.collect()


async def _live_until(node: DaemonNode, departure: Departure) -> str:
    """Lives as one node until it is over, or leaves in the time that a notice gives; returns
    why."""
    life = asyncio.create_task(node.live())
    stopping = asyncio.create_task(departure.noticed.wait())
    await asyncio.wait([life, stopping], return_when=asyncio.FIRST_COMPLETED)
    if not life.done():
        retiring = asyncio.create_task(node.retire(departure.left, departure.why))
        await asyncio.wait([life, retiring], return_when=asyncio.FIRST_COMPLETED)
        retiring.cancel()
        node.stop("stopped by its owner")
    stopping.cancel()
    try:
        return await life
    except Exception as error:
        await node.leave(f"{CRASHED}{error}")
        raise


def place_for_saves(folder: Path, instance: Instance, text: str) -> Path | None:
    """A node's own folder for saves in the run's `folder`, where its run file, `text`, goes, too.
    None: the folder can't be shared. Raises NodeError when it can't be written."""
    if instance.number is None:
        log.warning("this node doesn't save: %s can't be shared; give --save-dir", folder)
        return None
    saves = folder / str(instance.number)
    check_writable("--save-dir", saves)
    with NamedTemporaryFile("w", dir=folder, prefix=".planaria-", delete=False) as file:
        file.write(text)
    Path(file.name).replace(folder / RUN_FILE)
    log.info("stages are saved in %s", saves)
    return saves


def pick_device(name: str) -> torch.device:
    """The torch device of that name. Raises NodeError when it doesn't exist."""
    device = find_device(name)
    if device is None:
        gpus = [str(gpu) for gpu in accelerators()]
        raise NodeError(
            f"--device {name}: this machine shows {len(gpus)} GPUs to PyTorch: "
            f"{', '.join(gpus) or 'none'}. Check the driver (`nvidia-smi`), that the installed "
            "torch is built for it, or use --device cpu."
        )
    return device


def seats_that_fit(device: torch.device, config: ModelConfig) -> int:
    """Seats that fit into half of the device's memory, each as large as the largest stage's: at
    least one, at most one per stage."""
    return max(1, min(config.stages + 1, int(memory_of(device) / 2 / config.seat_bytes)))


async def find_place(setup: Setup, device: torch.device) -> NodePlace:
    """The node's addresses and stage, by its options. Raises RegistryUnreachable without a route to
    the registry."""
    options, addresses = setup.options, setup.addresses
    place = NodePlace(
        stage=options.stage,
        listen=str(addresses.listen),
        advertise=str(addresses.advertise or addresses.listen),
        device=device,
        out=options.out,
        host=socket.gethostname(),
        name=setup.name,
        log=setup.log,
        save_dir=options.saves,
        credentials=setup.credentials,
        insecure=options.insecure,
        standby=options.standby,
    )
    if addresses.dials_only:
        return replace(place, listen=None, advertise="")
    return await addressed(place, setup)


async def addressed(place: NodePlace, setup: Setup) -> NodePlace:
    """The place with the address that peers dial at present: a machine may get into another
    network. Raises as `find_address` does."""
    addresses = setup.addresses
    if addresses.dials_only or addresses.advertise is not None or addresses.listen.is_loopback:
        return place
    address, why = await find_address(addresses, setup.options.cloud)
    if str(address) != place.advertise:
        log.info(
            "peers dial this node at %s: %s (change it by --advertise HOST:PORT)", address, why
        )
    return replace(place, advertise=str(address))


def ask_by_saves(place: NodePlace) -> NodePlace:
    """The place of a node that joins now: it names the stages of which it has saves by now."""
    if place.save_dir is None:
        return place
    saves = saved_stages(place.save_dir)
    if saves:
        listed = ", ".join(map(str, saves))
        log.info("joins with saves of stage %s in %s", listed, place.save_dir)
    return replace(place, saves=saves)


async def find_address(addresses: Addresses, cloud: str) -> Advertised:
    """The address that peers dial, where none is given. Raises RegistryUnreachable: no route leads
    to it."""
    listen, advertised = addresses.listen, None
    try:
        route = await way_out(addresses.registries, PATIENCE)
    except OSError as error:  # a name service may be away, as where containers are started
        raise RegistryUnreachable(str(error)) from error
    if is_known_otherwise(listen, route):
        advertised = forwarded_address(listen, os.environ)
        if advertised is None and (trouble := unforwarded_port(listen, os.environ)):
            log.warning("%s", trouble)
        elif advertised is None and cloud in ("auto", "aws"):
            advertised = await asyncio.to_thread(address_by_aws, listen)
    return advertised or own_address(listen, route)


def address_by_aws(listen: Address) -> Advertised | None:
    """The public address by which AWS makes this machine reachable; None: there is none, or it
    isn't one of AWS's machines."""
    aws = Aws(partial(ask_metadata, timeout=ASIDE))
    try:
        public = aws.public_ipv4() if aws.is_here() else ""
    except OSError:  # no answer; notices.py reports it where AWS is expected
        return None
    except ValueError as error:
        log.warning("AWS reports no public address of this machine: %s", error)
        return None
    if not public:
        return None
    return Advertised(listen._replace(host=public), "AWS says that this is its public address")
