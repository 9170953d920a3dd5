"""A node that kills itself, with SIGKILL, at a point of the step transaction or of a rebuild."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any


def _points() -> dict[str, tuple[type, str, Callable[..., int]]]:
    """By name: the method at whose call a node dies, and the step that the call is about."""
    from node.driver import Driver
    from node.member import Member
    from node.rebuild import Rebuilding
    from node.transfer import StateServer

    return {
        # between Ready and Commit: a member that has the commit in its hands, the driver that has
        # decided and told nobody
        "commit": (Member, "_commit", lambda member, commit: commit.step),
        "decide": (Driver, "_decide", lambda driver, now: driver.begin.step),
        # in a rebuild: the joiner with all it has fetched, a source, the driver that has sent Sync
        "place": (Rebuilding, "_put_in_place", lambda self, sync, states: sync.step),
        "serve": (StateServer, "_send_manifest", lambda s, p, message: message.state_request.step),
        "sync": (Driver, "_synced", lambda driver, peer, synced, now: synced.step),
    }


def run_planaria_until(arguments: list[str]) -> None:
    """`planaria ARGUMENTS...`; in front of them, POINT@STEP: die there, at that step or later."""
    while "@" in arguments[0]:
        point, _, step = arguments.pop(0).partition("@")
        _arm(*_points()[point], int(step))
    from node.processes import run_planaria

    run_planaria(arguments)


def _arm(owner: type, name: str, step_of: Callable[..., int], step: int) -> None:
    method = getattr(owner, name)

    def dying(*arguments: Any) -> Any:
        if step_of(*arguments) >= step:
            os.kill(os.getpid(), signal.SIGKILL)
        return method(*arguments)

    setattr(owner, name, dying)
