"""The port to the network: streams and calls between processes, in bytes.

grpc_transport.py carries them over gRPC. The simulation carries them in memory, in virtual time.
Everything above this port runs unchanged in both.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Protocol, TypeAlias, TypeVar

from google.protobuf.message import DecodeError, Message

from planaria.bootstrap.address import Reach
from planaria.bootstrap.authority import Role, Who

M = TypeVar("M", bound=Message)


class Broken(Exception):  # noqa: N818 (not an error of this process)
    """A stream has failed, or was refused. `code`: the name of a gRPC status."""

    def __init__(self, code: str, details: str) -> None:
        super().__init__(code, details)
        self.code, self.details = code, details

    def __str__(self) -> str:
        if self.code == "ABORTED":
            return f"closed by the peer, which says: {self.details}"
        if self.code == "INTERNAL":  # a failed write, for which gRPC gives no reason
            return "the connection broke"
        return f"{self.code}: {self.details}"


class Stream(Protocol):
    """One end of a stream that carries items in both directions, each in order."""

    async def read(self) -> bytes | None:
        """The next item of the stream; None: the other end has closed it. Raises Broken."""

    async def write(self, data: bytes, /) -> None:
        """Send an item by the stream. Raises Broken."""


class DialledStream(Stream, Protocol):
    """The dialling end of a stream."""

    async def accepted(self) -> Mapping[str, str]:
        """The other end's metadata, once it has accepted the stream. Raises Broken."""

    def cancel(self) -> None:
        """Break the stream; without effect when it is over."""


class AcceptedStream(Stream, Protocol):
    """The accepting end of a stream."""

    metadata: Mapping[str, str]  # the dialler's

    @property
    def peer(self) -> str:
        """The dialler's address, for people."""

    @property
    def caller(self) -> Who:
        """The dialler's identity by its certificate; empty in plain text."""

    @property
    def seconds_left(self) -> float | None:
        """The seconds until the dialler's deadline; None: it has none."""

    def when_over(self, call: Callable[[], None]) -> None:
        """Have `call` called once the stream is over."""

    async def accept(self, metadata: Mapping[str, str]) -> None:
        """Accept the stream; the dialler gets the metadata. Raises Broken."""


Handler: TypeAlias = Callable[[AcceptedStream], Awaitable[None]]
"""Serves an accepted stream, and closes it by returning. It raises Broken to end the stream with a
code and a reason. It is cancelled when the dialler is gone."""


class Channel(Protocol):
    """A connection of its own to one address."""

    def stream(self, method: str, metadata: Mapping[str, str] | None = None) -> DialledStream:
        """Dial a method, `SERVICE/NAME`."""

    async def call(self, method: str, request: bytes, seconds: float) -> bytes:
        """The answer to one request: a stream that carries one item each way. `seconds`: its
        deadline, for the server, too. Raises Broken, with the refusal's status even if the other
        end refuses before it reads."""

    async def close(self) -> None:
        """Close the channel, and break all of its streams."""


class Transport(Protocol):
    """A process's access to the network."""

    async def not_to_dial(self, address: str) -> str:
        """Why HOST:PORT must not be dialled; "": it may be."""

    def channel(self, address: str, holder: str = Role.NODE) -> Channel:
        """A channel to HOST:PORT. `holder`: role or instance in the server's certificate."""

    async def is_alive(
        self, node: str, address: str, seconds: float, reach: Reach | None = None, holder: str = ""
    ) -> bool | None:
        """Whether the node answers at its address; None: nobody has answered in time. `reach`:
        where it may be dialled; None: where this transport dials."""

    async def serve(
        self, listen: str, handlers: Mapping[str, Handler], names: Collection[str]
    ) -> int:
        """Accept streams by method on HOST:PORT, port 0: any that is free. Returns the port. These
        `names` answer liveness checks. Raises OSError, CredentialsError."""

    async def stop(self, grace: float) -> None:
        """Stop serving; open streams have `grace` seconds to end."""


def parse(data: bytes, kind: type[M]) -> M:
    """Parses a message that the other end has sent. Raises Broken for other bytes."""
    try:
        return kind.FromString(data)
    except DecodeError:
        raise Broken("INTERNAL", f"what came is no {kind.DESCRIPTOR.name}") from None
