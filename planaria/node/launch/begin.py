"""Start of `planaria node`: its settings, and checks before torch is loaded."""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, TypeAlias

from planaria.bootstrap.address import Address
from planaria.node.launch.errors import NodeError

if TYPE_CHECKING:
    from planaria.bootstrap.credentials import Credentials
    from planaria.bootstrap.enrolment_pb2 import Invitation
    from planaria.node.data.mixture import Data
    from planaria.node.launch.instance import Instance
    from planaria.node.launch.node_options import Addresses, NodeOptions
    from planaria.node.page.http_address import PageAddress
    from planaria.node.report.log_stream import LastLines
    from planaria.node.run_file import DataSection, RunFile

log = logging.getLogger("planaria")


@dataclass(frozen=True)
class Setup:
    """A node's options, and what follows from them."""

    options: NodeOptions
    addresses: Addresses
    credentials: Credentials
    name: str = ""  # prefix of its identities
    log: LastLines | None = None  # its last lines, for other machines; None: not available to them
    metrics: PageAddress | None = None  # where it serves metrics
    invitation: Invitation | None = None  # invite that it enrolls with
    instance: Instance | None = None  # None: that of its folder


Serve: TypeAlias = Callable[..., Awaitable[int]]
"""Type of `planaria.node.serve.serve`, whose module loads torch."""


async def begin(setup: Setup, serve: Serve) -> int:
    """Get the registry's run, check that the node can serve it, and call `serve`. Returns the exit
    status. Raises NodeError, RegistryUnreachable, RunFileError, CredentialsError, NotAdmitted,
    OSError, and exceptions of `serve`."""
    from planaria.bootstrap.client import RegistryClient
    from planaria.bootstrap.credentials import check_port
    from planaria.node.run_file import loads

    options = setup.options
    for option, folder in (("--save-dir", options.saves), ("--out", options.out)):
        if folder is not None:
            check_writable(option, folder)
    if setup.invitation is not None:
        return await _begin_invited(setup, setup.invitation, serve)
    if not setup.addresses.dials_only:
        check_port(setup.addresses.listen, setup.credentials, options.insecure)
    run_kept = run_of_saves(options.saves)
    client = RegistryClient(setup.addresses.registries, setup.credentials, run_kept)
    try:
        await client.check_one_run()
        description = await client.describe()
        run = loads(description.run_file, "the registry's run file")
        check_stage(options.stage, run)
        check_module(run, options.allow_module)
        corpus = find_corpus(run, options)
        return await serve(setup, client, description, run, corpus)
    finally:
        await client.close()


async def _begin_invited(setup: Setup, invitation: Invitation, serve: Serve) -> int:
    """Begin a node with an invite; its folder has its key and, after enrolment, its certificate."""
    from planaria.bootstrap.authority import Role
    from planaria.bootstrap.credentials import Credentials
    from planaria.node.launch.enrolled import check_role, enrolled

    check_role(invitation, Role.NODE, Role.OWNER)
    options = setup.options
    folder = options.saves or options.out or Path("out") / invitation.run
    if invitation.HasField("stage"):
        options = replace(options, stage=invitation.stage)
    async with enrolled(invitation, folder) as (instance, certified):
        credentials = Credentials.of(certified, options.security.token)
        setup = replace(setup, options=options, credentials=credentials, instance=instance)
        return await begin(replace(setup, invitation=None), serve)


def run_of_saves(folder: Path | None) -> str:
    """The run of a node's saves, to which a restarted node keeps; empty: there are none."""
    if folder is None or not any(folder.glob("stage-*")):
        return ""
    from planaria.node.state.saves import saved_run  # loads torch

    if run := saved_run(folder):
        log.info(
            "joining only run %s, of which %s has saves; for another run name an empty folder, or "
            "convert them with `planaria regroup`",
            run,
            folder,
        )
    return run


def check_stage(stage: int | None, run: RunFile) -> None:
    """Check that the run has the node's --stage. Raises NodeError."""
    stages = run.model.body_stages
    if stage is not None and stages and stage > stages:
        raise NodeError(
            f"--stage {stage}: this run has stages 0 to {stages}; choose one of them, or leave "
            "--stage out"
        )


def check_module(run: RunFile, allowed: str | None) -> None:
    """Check that the run's own code, if it has any, may be loaded. Raises NodeError."""
    module = run.model.module
    if module is not None and module != allowed:
        instead = f" (and not --allow-module {allowed})" if allowed is not None else ""
        raise NodeError(
            f"this run's model is code, {module}, and a node loads code only if its owner allows "
            "it. If you trust the run's operator, install that code, or put it in the folder in "
            f"which the node starts; then start the node with --allow-module {module}{instead}"
        )


def check_reachable(addresses: Addresses) -> None:
    """Check that other machines could dial the node. Raises NodeError, AddressError."""
    registries, listen, advertise, dials_only = addresses
    if advertise is not None and advertise.is_any:
        raise NodeError(
            f"--advertise {advertise} stands for all addresses of a machine, and can't be dialled: "
            "give the address at which other nodes reach this machine"
        )
    remotes = [registry for registry in registries if not Address.to_dial(registry).is_loopback]
    if remotes and not (advertise or dials_only) and listen.is_loopback:
        raise NodeError(
            f"--listen {listen} can be reached from this machine only, but the registry at "
            f"{remotes[0]} serves other machines, too. Give --listen 0.0.0.0:PORT, and --advertise "
            "HOST:PORT if others dial this machine at another address. For a node that only dials "
            "out, give --advertise none"
        )


def check_writable(option: str, folder: Path) -> None:
    """Write into a node's folder: permissions don't show a full disk. Raises NodeError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=folder, prefix=".planaria-") as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        why = "it is a file" if isinstance(error, FileExistsError) else error.strerror
        raise NodeError(
            f"{option} {folder} can't be written: {why}; let this user write there, "
            "free space, or name another folder"
        ) from error


def find_corpus(run: RunFile, options: NodeOptions) -> Data | None:
    """The prepared data of a node, from --data, else by content in `PLANARIA_DATA`, else the run
    file's path below this node's own folder; needed at stage 0 only.

    Raises NodeError when stage 0 or --data was requested, and the data can't be used.
    """
    from planaria.node.data.corpus import CorpusError
    from planaria.node.data.mixture import find_by_content, open_data
    from planaria.node.data.remote_corpus import local_folder_of
    from planaria.node.launch.own_folders import data_below, own_folder

    links = (options.saves or options.out or Path("out")) / "data"
    places = options.data or find_by_content(run.data)
    needed = options.stage == 0 or bool(options.data)
    data: DataSection | None
    try:
        data = run.data if places else data_below(own_folder(options.out, run), run.data)
    except NodeError:
        if needed:
            raise
        data = None
    if data is None or not (needed or places or all(path.exists() for path in data.folders)):
        log.info("this node has no prepared data (--data DIR), so it serves any stage but 0")
        return None
    try:
        corpus = open_data(data, [local_folder_of(place, links) for place in places])
    except CorpusError as error:
        if needed:
            raise NodeError(
                f"{error} (--data DIR or --data URL says where the prepared data is)"
            ) from error
        log.warning("this node can't serve stage 0: %s", error)
        return None
    if problem := corpus.index.misfit(corpus.path, run.data.content, run.model.vocabulary):
        place = " with ".join(places) or data.where
        if needed:
            raise NodeError(f"{place} {problem}")
        log.warning("this node can't serve stage 0: %s %s", place, problem)
        return None
    return corpus
