"""Replicas of a stage sum their gradients: a reduce-scatter, then an all-gather.

With R replicas, sorted by node id, replica i owns the i-th of R equal parts of the flat gradient.
Everyone sends its values of a part to the owner, who adds them up in the order of the node ids and
sends the sum to all. The order of arrival changes nothing, and with a lossy codec the owner, too,
goes on with the decoded bits: replicas stay bit-identical.

A gradient is already a sum over tokens divided by the tokens of the whole window. So the replicas'
gradients simply add up, whatever share of the window each of them has computed: no weights.

The first piece of every contribution names the microbatches in it. Every replica owns a part, so
every replica sees all the names and checks for itself that the stage applied each one once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal, TypeAlias

import torch

from planaria.node.wire.frames import Codec, Frame, WireError
from planaria.node.wire.tensors import decode, encode

log = logging.getLogger(__name__)

PIECE: Final = 2 << 20  # values of a part that travel in one frame: 8 MiB of float32
EARLY_LIMIT: Final = 2 << 30  # bytes kept of one peer that is ahead of this node
NAMED: Final = 8  # microbatches in an error message

Outgoing: TypeAlias = list[tuple[str, Frame]]  # frames, each with the node it goes to


class AveragingError(Exception):
    """The gradients can't be summed; the gradient's contents are void, the attempt has failed.

    `accused`: the nodes that were waited for in vain, or that sent what can't be right.
    """

    def __init__(self, reason: str, accused: Collection[str] = ()) -> None:
        super().__init__(reason)
        self.accused = sorted(accused)


class ReplicaLostError(AveragingError):
    """One of the replicas can't be reached: without it, or with what it did done by others, the
    gradients can still be summed."""


class Abandoned(Exception):  # noqa: N818 (not an error)
    """A newer ballot has made this reduction void, and the gradient's contents with it."""


def check_ids(shares: Mapping[str, Collection[int]], window: int) -> None:
    """Each of the microbatches 0..window-1 is in exactly one replica's share, once.

    Raises AveragingError that names the ids that are not, and accuses who holds them.
    """
    holders: dict[int, list[str]] = {}
    for node, ids in sorted(shares.items()):
        for microbatch in ids:
            holders.setdefault(microbatch, []).append(node)
    unknown = sorted(i for i in holders if not 0 <= i < window)
    twice = sorted(i for i, nodes in holders.items() if len(nodes) > 1)
    missing = [i for i in range(window) if i not in holders]
    faults = []
    if unknown:
        faults.append(f"not of this window: {_name_ids(unknown, holders)}")
    if twice:
        faults.append(f"more than once: {_name_ids(twice, holders)}")
    if missing:
        faults.append(f"in nobody's gradient: {_name_ids(missing, holders)}")
    if faults:
        accused = {node for i in unknown + twice for node in holders[i]}
        raise AveragingError(
            f"the stage's gradient is not that of the window's {window} microbatches; "
            + "; ".join(faults),
            accused,
        )


def _name_ids(ids: Sequence[int], holders: Mapping[int, Sequence[str]]) -> str:
    named = [f"{i} ({', '.join(holders[i])})" if i in holders else str(i) for i in ids[:NAMED]]
    return ", ".join(named) + (f" and {len(ids) - NAMED} more" if len(ids) > NAMED else "")


class Averaging:
    """One node's side of the reductions, one at a time.

    `send_frame` queues a frame for a peer and says False when there is no way to it.
    `in_compute_thread` posts work at once and must run what it gets in order: whoever touches the
    gradient after a reduction has failed does so through it, behind the reduction's last work.
    All methods belong to one event loop.
    """

    def __init__(
        self,
        node: str,
        send_frame: Callable[[str, Frame], bool],
        in_compute_thread: Callable[[Callable[[], Outgoing]], Awaitable[Outgoing]],
        codec: Codec,
    ) -> None:
        self._node = node
        self._send_frame = send_frame
        self._in_compute_thread = in_compute_thread
        self._codec: Codec = codec
        self._running: _Running | None = None
        self._oldest = (0, 0)  # ballot; below it nothing has an effect
        self._early: list[tuple[str, Frame]] = []

    async def reduce(
        self,
        ballot: tuple[int, int],
        replicas: Sequence[str],
        gradient: torch.Tensor,
        ids: Collection[int],
        window: int,
        deadline: float,
    ) -> None:
        """Replace `gradient` (float32 [n], contiguous) by its sum over `replicas`, in place.

        `replicas` are the stage's members, this node among them; `ids` the microbatches that this
        node's gradient is of; `window` their number over all replicas. `deadline` bounds, in
        seconds, how long frames of others are waited for.

        Takes about twice the gradient's memory, one half of it for what waits to be sent.
        Raises AveragingError, Abandoned, or ValueError for arguments that can't be meant.
        """
        # Before anything else: an older reduction must not touch the gradient any more.
        if ballot < self._oldest:
            raise Abandoned(f"ballot {ballot} is void since {self._oldest}")
        self.abandon(ballot)
        running = self._running = _Running(ballot)
        try:
            reduction = Reduction(self._node, ballot, replicas, gradient, ids, window, self._codec)
            for peer, frame in self._take_early(ballot):
                running.inbox.put_nowait((peer, frame))
            await self._exchange(running, reduction, deadline)
        finally:
            if self._running is running:
                self._running = None
            view, attempt = ballot
            self.abandon((view, attempt + 1))

    def on_frame(self, peer: str, frame: Frame) -> None:
        """A frame of kind "average" has come. It waits for its reduction if that is to start yet;
        if it is over or void, the frame has no effect."""
        if self._running is not None and frame.ballot == self._running.ballot:
            self._running.inbox.put_nowait((peer, frame))
        elif frame.ballot >= self._oldest:
            self._keep_early(peer, frame)

    def on_peer_lost(self, peer: str, reason: str) -> None:
        """The link to `peer` is gone: the reduction fails if it still needs something from there.

        Frames that have come before are still good."""
        if self._running is not None:
            self._running.inbox.put_nowait((peer, reason))

    def abandon(self, before: tuple[int, int]) -> None:
        """Ballots older than `before` are void: their reduction raises Abandoned."""
        self._oldest = max(self._oldest, before)
        self._early = [(p, frame) for p, frame in self._early if frame.ballot >= self._oldest]
        if self._running is not None and self._running.ballot < self._oldest:
            self._running.void = True
            self._running.inbox.put_nowait(None)

    def _keep_early(self, peer: str, frame: Frame) -> None:
        kept = sum(f.size for p, f in self._early if p == peer)
        if kept + frame.size > EARLY_LIMIT:
            log.warning(
                "dropped a gradient from %s: %d bytes of its reductions to come are kept already",
                *(peer, kept),
            )
            return
        self._early.append((peer, frame))

    def _take_early(self, ballot: tuple[int, int]) -> list[tuple[str, Frame]]:
        taken = [(peer, frame) for peer, frame in self._early if frame.ballot == ballot]
        self._early = [(peer, frame) for peer, frame in self._early if frame.ballot != ballot]
        return taken

    async def _exchange(self, running: _Running, reduction: Reduction, deadline: float) -> None:
        end = asyncio.get_running_loop().time() + deadline
        for number in range(reduction.pieces):
            await self._compute(running, partial(reduction.contribute, number))
        while awaited := reduction.awaited():
            phase, nodes = awaited
            try:
                async with asyncio.timeout_at(end):
                    item = await running.inbox.get()
            except TimeoutError:
                raise AveragingError(
                    f"after {deadline:g} s the {phase} of {', '.join(nodes)} is not there", nodes
                ) from None
            running.check()
            match item:
                case (peer, Frame() as frame) if peer in reduction.ranks:
                    await self._compute(running, partial(reduction.absorb, peer, frame))
                case (peer, Frame()):
                    log.warning("dropped a gradient from %s, no replica of this stage", peer)
                case (peer, str() as reason) if reduction.needs(peer):
                    raise ReplicaLostError(
                        f"lost {peer} before its sums were here: {reason}", [peer]
                    )

    async def _compute(self, running: _Running, work: Callable[[], Outgoing]) -> None:
        outgoing = await self._in_compute_thread(work)
        running.check()
        for peer, frame in outgoing:
            if not self._send_frame(peer, frame):
                raise ReplicaLostError(f"there is no link to {peer}", [peer])


class _Running:
    """The reduction under way, as the event loop sees it."""

    def __init__(self, ballot: tuple[int, int]) -> None:
        self.ballot = ballot
        self.void = False
        # A frame, or why its sender is lost; None wakes up who waits.
        self.inbox: asyncio.Queue[tuple[str, Frame | str] | None] = asyncio.Queue()

    def check(self) -> None:
        """Raises Abandoned."""
        if self.void:
            raise Abandoned(f"ballot {self.ballot} is void: there is a newer one")


class Reduction:
    """The arithmetic of one reduction at one node: frames in, frames out. All of it runs in the
    compute thread, but for the questions `awaited` and `needs`, asked between two of its tasks.

    Frames, by `fields`: {"phase": "contribution", "piece": k}, to the owner of a part, the first
    one with "ids"; {"phase": "sum", "piece": k}, from the owner to all.
    """

    def __init__(
        self,
        node: str,
        ballot: tuple[int, int],
        replicas: Sequence[str],
        gradient: torch.Tensor,
        ids: Collection[int],
        window: int,
        codec: Codec,
    ) -> None:
        """Raises ValueError, and AveragingError when this node is alone and ids are wrong."""
        if gradient.dim() != 1 or gradient.dtype != torch.float32 or not gradient.is_contiguous():
            raise ValueError(
                "a gradient to be averaged is one contiguous row of float32, not "
                f"{gradient.dtype} {tuple(gradient.shape)}"
            )
        self.nodes = sorted(replicas)
        self.ranks = {name: rank for rank, name in enumerate(self.nodes)}
        if node not in self.ranks or len(self.ranks) < len(self.nodes):
            raise ValueError(f"replicas {self.nodes} don't name {node} and each other once")
        self.node, self.rank = node, self.ranks[node]
        self.ballot, self.codec, self.window = ballot, codec, window
        self.parts = [
            _pieces(gradient.detach(), rank, len(self.nodes)) for rank in self.ranks.values()
        ]
        self.shares: dict[str, Collection[int]] = {node: sorted(ids)}
        own = self.parts[self.rank]
        self.totals: list[torch.Tensor | None] = [None] * len(own)
        self.added = [0] * len(own)  # replicas whose contribution is in the total
        self.held: dict[tuple[int, int], Frame] = {}  # contributions by piece, rank
        others = [rank for rank in self.ranks.values() if rank != self.rank]
        self.contributions = {rank: set(range(len(own))) for rank in others}  # to come
        self.sums = {rank: set(range(len(self.parts[rank]))) for rank in others}  # to come
        if not others:
            check_ids(self.shares, window)

    @property
    def pieces(self) -> int:
        """In the part that has most of them."""
        return max(map(len, self.parts)) if self.contributions else 0

    def awaited(self) -> tuple[str, list[str]] | None:
        """What is missing, and from whom; None: the gradient is the sum.

        Who waits for a contribution can't send its sums, so contributions are missed first."""
        for phase, missing in (("contribution", self.contributions), ("sum", self.sums)):
            if nodes := [self.nodes[rank] for rank, pieces in missing.items() if pieces]:
                return phase, nodes
        return None

    def needs(self, peer: str) -> bool:
        """Is anything from `peer` still missing?"""
        rank = self.ranks.get(peer)
        return rank in self.sums and bool(self.contributions[rank] or self.sums[rank])

    def contribute(self, piece: int) -> Outgoing:
        """This node's values of the piece of every other part, to the part's owner."""
        outgoing = []
        # Everyone starts with its successor, so that not all send to the same owner at once.
        for rank in (*range(self.rank + 1, len(self.nodes)), *range(self.rank)):
            if piece >= len(self.parts[rank]):
                continue
            # A copy: what waits to be sent must not change, whatever becomes of the gradient.
            frame = self._frame("contribution", piece, self.parts[rank][piece].clone())
            if piece == 0:
                frame.fields["ids"] = self.shares[self.node]
            outgoing.append((self.nodes[rank], frame))
        return outgoing

    def absorb(self, peer: str, frame: Frame) -> Outgoing:
        """Take in a replica's frame; the sums that it completes are to be sent.

        Raises AveragingError for a frame that can't be right, and for ids that aren't the window's.
        """
        phase, piece, rank = frame.fields.get("phase"), frame.fields.get("piece"), self.ranks[peer]
        missing = {"contribution": self.contributions, "sum": self.sums}.get(str(phase), {})
        if type(piece) is not int or piece not in missing.get(rank, ()):
            raise AveragingError(f"{peer} sent piece {piece!r} of phase {phase!r} unasked", [peer])
        missing[rank].discard(piece)
        if phase == "sum":
            self.parts[rank][piece].copy_(self._values(peer, frame, self.parts[rank][piece]))
            return []
        if piece == 0:
            self._note_ids(peer, frame.fields.get("ids"))
        self.held[piece, rank] = frame
        return self._add(piece)

    def _note_ids(self, peer: str, ids: Any) -> None:
        if not isinstance(ids, list) or not all(type(i) is int for i in ids):
            raise AveragingError(f"{peer} names its microbatches by {ids!r}, no list", [peer])
        self.shares[peer] = ids
        if len(self.shares) == len(self.nodes):
            check_ids(self.shares, self.window)

    def _add(self, piece: int) -> Outgoing:
        """Add to a piece's total what is there in the order of ranks."""
        own = self.parts[self.rank][piece]
        while (rank := self.added[piece]) < len(self.nodes):
            if rank == self.rank:
                values = own
            elif frame := self.held.pop((piece, rank), None):
                values = self._values(self.nodes[rank], frame, own)
            else:
                return []
            total = self.totals[piece]
            self.totals[piece] = values.clone() if total is None else total.add_(values)
            self.added[piece] += 1
        total, self.totals[piece] = self.totals[piece], None
        assert total is not None
        frame = self._frame("sum", piece, total)
        # With a lossy codec: what the others will have, not what was sent to them.
        own.copy_(total if self.codec == "none" else self._values(self.node, frame, own))
        return [(self.nodes[rank], frame) for rank in self.sums]

    def _frame(
        self, phase: Literal["contribution", "sum"], piece: int, values: torch.Tensor
    ) -> Frame:
        descriptors, payload = encode([values], self.codec)
        fields = {"phase": phase, "piece": piece}
        return Frame("average", self.ballot, fields, descriptors, payload)

    def _values(self, peer: str, frame: Frame, like: torch.Tensor) -> torch.Tensor:
        try:
            tensors = decode(frame.descriptors, frame.payload, like.device)
        except WireError as error:
            raise AveragingError(f"what {peer} sent is damaged: {error}", [peer]) from error
        if [(t.dtype, t.shape) for t in tensors] != [(like.dtype, like.shape)]:
            found = ", ".join(f"{t.dtype} {tuple(t.shape)}" for t in tensors)
            raise AveragingError(
                f"{peer} sent {found or 'nothing'} for {like.dtype} {tuple(like.shape)}", [peer]
            )
        return tensors[0]


def _pieces(gradient: torch.Tensor, rank: int, replicas: int) -> list[torch.Tensor]:
    """Views of the rank's part. An empty part is one empty piece, for the ids go with a piece."""
    start, stop = (gradient.numel() * i // replicas for i in (rank, rank + 1))
    part = gradient[start:stop]
    return [part[first : first + PIECE] for first in range(0, max(1, part.numel()), PIECE)]
