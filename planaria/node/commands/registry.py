"""How commands ask a registry, and end at once if none can be reached."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, TypeVar

import typer

from planaria.bootstrap.address_probe import (
    NO_PROXY,
    NOBODY,
    Reachability,
    probe_all,
    proxies,
    why_unreachable,
)
from planaria.node.commands.terminal import print_error, warn
from planaria.node.launch.options import Security

if TYPE_CHECKING:
    from planaria.bootstrap.client import RegistryClient
    from planaria.bootstrap.credentials import Credentials

T = TypeVar("T")

PROBE = 3.0
"""Seconds to wait for an address to take, or refuse, a connection."""


def credentials_for(join: str, security: Security, role: str | None = None) -> Credentials:
    """A command's credentials by the invite in --join, else from files, if given. `role`: required
    role of the invite. Raises InviteError, CredentialsError; ends if the invite is refused."""
    from planaria.bootstrap.credentials import Credentials
    from planaria.node.launch.enrolled import check_role, enrolled, enrolment_folder, invitation_of

    invitation = invitation_of(join)
    if invitation is None:
        return security.credentials()
    if role is not None:
        check_role(invitation, role)
    check_registry(join)

    async def come() -> Credentials:
        async with enrolled(invitation, enrolment_folder(invitation)) as (_, certified):
            return Credentials.of(certified, security.token)

    return run_on_loop(come())


def check_registry(join: str) -> None:
    """End the command at once if no registry can be reached."""
    from planaria.node.launch.enrolled import addresses_of

    addresses = addresses_of(join)
    check_registries(addresses, [Reachability.UNKNOWN, Reachability.REFUSED], 1)


def check_registries(addresses: Sequence[str], final: Sequence[Reachability], status: int) -> None:
    """End the command with that status if all addresses have a final answer, else warn."""
    answers = asyncio.run(probe_all(addresses, PROBE))
    proxy = f". {warning}: {NO_PROXY}" if (warning := proxies(os.environ)) else ""
    if why := why_unreachable(answers, final):
        print_error(f"{why}{proxy}")
        raise typer.Exit(status)
    if why := why_unreachable(answers, NOBODY):
        warn(f"{why}{proxy}. Trying again")


def ask_registry(
    join: str,
    credentials: Credentials,
    question: Callable[[RegistryClient], Coroutine[object, object, None]],
) -> None:
    """Ask the registry, without a time limit, until it has answered. Raises KeyboardInterrupt."""
    from planaria.bootstrap.client import RegistryClient
    from planaria.node.launch.enrolled import addresses_of, renewed

    addresses = addresses_of(join)
    check_registry(join)

    async def ask() -> None:
        client = RegistryClient(addresses, credentials)
        try:
            async with renewed(credentials.certified):
                await client.check_one_run()
                await question(client)
        finally:
            await client.close()

    run_on_loop(ask())


def run_on_loop(work: Coroutine[object, object, T]) -> T:
    """Run a coroutine on uvloop, which is faster; on Windows on asyncio's own loop."""
    if sys.platform == "win32":
        return asyncio.run(work)
    import uvloop

    return uvloop.run(work)
