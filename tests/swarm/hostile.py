"""`planaria node`, by the very code that ships, which says in its own name what a file tells it to.

A member by right: it joins, links are its own, it does its work. `tell(FILE, "halt")` from another
process makes it lie so at each tick, `tell(FILE, "")` no more.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from planaria.bootstrap.registry_pb2 import SHAPE
from planaria.node.agent import Agent
from planaria.node.transaction.effects import Ballot, Effect, Send
from planaria.node.wire import stage_pb2 as pb
from tests.swarm.paced import run_paced

MUCH = 10**6  # steps
VIEW, ATTEMPT = 1 << 40, (1 << 64) - 1


def tell(file: Path, lie: str) -> None:
    unfinished = file.with_name(f"{file.name}.unfinished")
    unfinished.write_text(lie)
    unfinished.replace(file)


def query(agent: Agent) -> tuple[Ballot, dict[str, Any]]:
    return Ballot(VIEW, 1), {"query": pb.Query()}


def halt(agent: Agent) -> tuple[Ballot, dict[str, Any]]:
    coming = Ballot(agent.member.promised.view + 1, 1)
    return coming, {"halt": pb.Halt(reason="it is over", step=agent.member.committed)}


def sync(agent: Agent) -> tuple[Ballot, dict[str, Any]]:
    step, coming = agent.member.committed, Ballot(agent.member.promised.view + 1, 1)
    source = pb.Source(node=agent.node, stage=agent.stage, step=step)
    return coming, {"sync": pb.Sync(step=step, method="replica", sources=[source])}


def status(agent: Agent) -> tuple[Ballot, dict[str, Any]]:
    """So that it is asked what it has; see `_answering`."""
    return agent.member.promised, {"failed": pb.Failed(reason="something is wrong here")}


def stale(agent: Agent) -> tuple[Ballot, dict[str, Any]]:
    return Ballot(agent.member.promised.view, ATTEMPT), {"stale": pb.Stale()}


def failed(agent: Agent) -> tuple[Ballot, dict[str, Any]]:
    """Whoever is at stage 1 is innocent."""
    accused = [seat for seat, stage in agent.peers.items() if stage == 1]
    return agent.member.promised, {
        "failed": pb.Failed(reason="its tensors are wrong", accused=accused, cause=SHAPE)
    }


def slander(agent: Agent) -> tuple[Ballot, dict[str, Any]]:
    """One of those at stage 1, and no other one of them."""
    first = min((seat for seat, stage in agent.peers.items() if stage == 1), default="")
    return agent.member.promised, {
        "failed": pb.Failed(reason="its tensors are wrong", accused=[first], cause=SHAPE)
    }


LIES: dict[str, Callable[[Agent], tuple[Ballot, dict[str, Any]]]] = {
    lie.__name__: lie for lie in (query, halt, sync, status, stale, failed, slander)
}


JOINING: Final = "joining"
"""It says nothing, and when it is asked what it has, what can't be."""


def lie_as(file: Path) -> None:
    """From here on the nodes of this process say what the file says."""
    tick, carry_out_one = Agent.tick, Agent._carry_out_one

    def told() -> str:
        return file.read_text() if file.exists() else ""

    def ticking(agent: Agent, now: float) -> None:
        tick(agent, now)
        if (lie := told()) in LIES:
            ballot, body = LIES[lie](agent)
            for peer in agent.peers:
                if peer != agent.node:
                    agent.send(peer, ballot.send(peer, **body).message)

    def answering(agent: Agent, effect: Effect) -> None:
        is_status = isinstance(effect, Send) and effect.message.WhichOneof("body") == "status"
        if is_status and told() in ("status", JOINING):
            claimed = effect.message.status
            claimed.committed = claimed.last.step = MUCH
        carry_out_one(agent, effect)

    Agent.tick, Agent._carry_out_one = ticking, answering


def run_hostile(arguments: list[str]) -> None:
    """`planaria ARGUMENTS...`; behind `--lies FILE`, with these. For `Processes`."""
    if arguments[0] == "--lies":
        lie_as(Path(arguments[1]))
        arguments = [*arguments[2:], "--restart", "no"]  # another process would be honest
    run_paced(arguments)
