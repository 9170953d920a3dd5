"""Commands of a run's operator: who is in it, and pause, go, change, back, stop."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer
from rich.markup import escape
from rich.table import Column, Table

from planaria.bootstrap import enrolment_pb2 as pb
from planaria.bootstrap.escaping import readable
from planaria.bootstrap.operator_orders import BACK, CHANGE
from planaria.node.commands.registry import ask_registry, credentials_for
from planaria.node.commands.terminal import console, fail, say, warn
from planaria.node.launch.options import Join, Security, flattened

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from planaria.bootstrap.client import RegistryClient

PATIENCE: Final = 20.0
"""Seconds until an operator hears what a change waits for."""
LOOK: Final = 0.5
"""Seconds between two looks whether a change of settings holds."""


@dataclass(frozen=True, kw_only=True)
class InviteOptions:
    """Options of `planaria invite`."""

    join: Join
    uses: Annotated[int, typer.Option(min=0, help="How often it can be used; 0: unlimited.")] = 1
    hours: Annotated[
        float,
        typer.Option(
            min=0, show_default="24", help="Hours for which it is valid; 0: until it is revoked."
        ),
    ] = 24.0
    stage: Annotated[
        int | None,
        typer.Option(min=0, help="The stage that its nodes must ask for; 0 implies role owner."),
    ] = None
    role: Annotated[
        Literal["owner", "node", "reader", "operator"],
        typer.Option(
            help="owner: serve any stage; node: any but 0; reader: watch; operator: also command."
        ),
    ] = "node"
    listing: Annotated[
        bool, typer.Option("--list", envvar="PLANARIA_INVITE_LIST", help="List the invites.")
    ] = False
    revoke: Annotated[str | None, typer.Option(metavar="ID", help="Make this invite invalid.")] = (
        None
    )
    security: Security


@flattened
def invite_command(options: InviteOptions) -> None:
    """Create an invite to a run, list invites, or revoke one; whoever has it can join."""
    from planaria.bootstrap.invites import encode
    from planaria.node.launch.enrolled import invitation_of

    async def act(client: RegistryClient) -> None:
        if options.revoke is not None:
            done = await client.command("Revoke", pb.RevokeRequest(id=options.revoke))
            say(done.what)
            return
        if options.listing:
            listed = await client.command("ListInvites", pb.ListInvitesRequest())
            table = Table("id", "as", "used", "until")
            for invite in listed.invites:
                used = f"{invite.used} of {invite.uses}" if invite.uses else f"{invite.used}"
                scope = (
                    f"{invite.role} of stage {invite.stage}"
                    if invite.HasField("stage")
                    else invite.role
                )
                table.add_row(invite.id, scope, used, _until(invite.ends, invite.revoked))
            console.print(table)
            return
        if invitation is None:
            fail("--join must be an operator's invite, from which a new one takes the addresses")
        role, stage, seconds = options.role, options.stage, 3600 * options.hours
        if (role, stage) == ("node", 0):
            role = "owner"
            warn("only nodes of the run's owner serve stage 0: this invite has the role owner")
        request = pb.InviteRequest(role=role, stage=stage, uses=options.uses, seconds=seconds)
        made = await client.command("Invite", request)
        invitation.MergeFrom(pb.Invitation(secret=made.secret, role=role, stage=stage))
        say(encode(invitation))

    invitation = invitation_of(options.join)
    credentials = credentials_for(options.join, options.security, "operator")
    ask_registry(options.join, credentials, act)


def _until(ends: float, revoked: bool) -> str:
    if revoked:
        return "revoked"
    if not ends:
        return "it is revoked"
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(ends))


@flattened
def members_command(join: Join, security: Security) -> None:
    """List a run's members, its enrolled nodes and their invites, and banned nodes."""

    async def show(client: RegistryClient) -> None:
        listed = await client.command("ListEnrolled", pb.ListEnrolledRequest())
        described = await client.describe()
        members = {entry.instance: entry.member for entry in described.members}
        enrolled = {entry.instance: entry for entry in listed.enrolled}
        folded = (Column(name, overflow="fold") for name in ("as", "node", "address", "invite"))
        table = Table(Column("instance", no_wrap=True), *folded)
        for instance in dict.fromkeys([*members, *enrolled, *listed.banned]):
            member, entry = members.get(instance), enrolled.get(instance)
            own_role = "owner" if member and member.owner else "node"
            role = entry.role if entry else own_role
            table.add_row(
                instance,
                "banned" if instance in listed.banned else role,
                readable(member.node) if member else "",
                escape(readable(member.address)) if member else "",
                entry.invite if entry else "",
            )
        console.print(table)

    ask_registry(join, credentials_for(join, security, "operator"), show)


@flattened
def evict_command(
    node: Annotated[str, typer.Argument(metavar="NODE", help="The node's name in status.")],
    join: Join,
    security: Security,
) -> None:
    """Remove a node from a run; it may join again under a new node id."""
    _command(join, security, "Evict", pb.EvictRequest(node=node))


@flattened
def ban_command(
    who: Annotated[
        str, typer.Argument(metavar="NODE|INSTANCE", help="As in status or `planaria members`.")
    ],
    join: Join,
    security: Security,
) -> None:
    """Evict a node, and refuse its key from then on, whatever its name."""
    _command(join, security, "Ban", pb.BanRequest(who=who))


@flattened
def allow_command(
    instance: Annotated[
        str, typer.Argument(metavar="INSTANCE", help="A banned instance, as in `planaria members`.")
    ],
    join: Join,
    security: Security,
) -> None:
    """Lift a ban."""
    _command(join, security, "Allow", pb.AllowRequest(instance=instance))


Why = Annotated[str, typer.Option(help="Reason, shown by status and page.")]


@flattened
def pause_command(join: Join, security: Security, why: Why = "") -> None:
    """Pause a run at its next step; its nodes wait for `planaria go`."""
    _order(join, security, "pause", why)


@flattened
def go_command(join: Join, security: Security) -> None:
    """Continue a paused run, or let nodes join a stopped one again."""
    _order(join, security, "go", "")


@flattened
def change_command(
    settings: Annotated[
        list[str],
        typer.Argument(metavar="KEY=VALUE...", help="Keys of the run file, as steps=4000."),
    ],
    join: Join,
    security: Security,
    at: Annotated[
        int | None,
        typer.Option(min=1, metavar="STEP", help="First with the new settings. Default: the next."),
    ] = None,
) -> None:
    """Change a run's settings: each stage saves its step, and the nodes continue from there."""
    _change(join, security, settings, None if at is None else at - 1)


@flattened
def back_command(
    to: Annotated[int, typer.Option(min=1, metavar="STEP", help="It must be saved by each stage.")],
    join: Join,
    security: Security,
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE...]", help="Settings to change, too.")
    ] = None,
) -> None:
    """Take a run back to a saved step, from which its nodes continue; later steps don't count."""
    _change(join, security, settings or [], to, goes_back=True)


def _change(
    join: str,
    security: Security,
    settings: Sequence[str],
    after: int | None,
    goes_back: bool = False,
) -> None:
    """Change a run's settings after a step; None: the newest. It may go back to a past one."""
    from planaria.node.report.run_state import RunState

    async def change(client: RegistryClient) -> None:
        described = await client.describe()
        before, committed = len(described.view.changes), RunState(described).committed
        step = committed if after is None else after
        if not goes_back and step < committed:
            fail(f"--at {step + 1}: the run is at step {committed} already; choose a later one")
        request = pb.CommandRequest(
            word=BACK if goes_back else CHANGE, settings=settings, step=after or 0
        )
        say((await client.command("Command", request)).what)
        if step <= committed:
            await _await_change(client, before)

    ask_registry(join, credentials_for(join, security, "operator"), change)


async def _await_change(client: RegistryClient, before: int) -> None:
    """Wait until a change of settings holds that was ordered when there were `before` others."""
    from planaria.node.report.run_state import RunState
    from planaria.node.report.unsaved import stage_names, unsaved_stages

    for look in itertools.count(1):
        await asyncio.sleep(LOOK)
        described = await client.describe()
        changes = described.view.changes
        if len(changes) == before:
            fail("that was withdrawn; `planaria status` says why")
        if not changes[-1].pending:
            say(f"the run goes on from step {changes[-1].step + 1}")
            return
        if look * LOOK == PATIENCE:
            state = RunState(described)
            stages = {seat.stage for seat in state.reports}
            if lacking := unsaved_stages(described, stages, state.committed):
                which = stage_names(lacking)
                say(f"waiting for a save of {which}: have its nodes a --save-dir?", "yellow")


@flattened
def stop_command(
    join: Join,
    security: Security,
    why: Why = "",
    now: Annotated[
        bool, typer.Option("--now", help="Don't wait for saves: newer steps are lost.")
    ] = False,
) -> None:
    """End a run once each stage has saved its step; its nodes end, and are not restarted."""
    _order(join, security, "end" if now else "stop", why)


def _order(join: str, security: Security, word: str, why: str) -> None:
    _command(join, security, "Command", pb.CommandRequest(word=word, why=why))


def _command(join: str, security: Security, method: str, request: Message) -> None:

    async def act(client: RegistryClient) -> None:
        say((await client.command(method, request)).what)

    ask_registry(join, credentials_for(join, security, "operator"), act)
