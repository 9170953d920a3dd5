"""Replicas of a stage sum their gradients: a reduce-scatter, then an all-gather.

With R replicas, sorted by node id, replica i owns the i-th of R equal parts of the flat gradient.
Everyone sends its values of a part to the owner, who adds them up in the order of the node ids and
sends the sum to all. The order of arrival changes nothing, and with a lossy codec the owner, too,
goes on with the decoded bits: replicas stay bit-identical. What int8, topk and lowrank leave out,
of a contribution and of a sum, is held back for the next step (held_back.py).

A gradient is already a sum over tokens divided by the tokens of the whole window. So the replicas'
gradients simply add up, whatever share of the window each of them has computed: no weights.

The first piece of every contribution names the microbatches in it. Every replica owns a part, so
every replica sees all the names and checks for itself that the stage applied each one once.

What comes is finite, or its sender is named: a contribution before it is in any sum, a sum since
all that is in it was.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import chain, pairwise
from random import Random
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from planaria.bootstrap.registry_pb2 import NUMBERS
from planaria.node.ports import Tensors
from planaria.node.transaction.effects import NEVER, Ballot
from planaria.node.transaction.held_back import HeldBack
from planaria.node.transaction.standing_out import COMPARABLE, Contribution, looked_at
from planaria.node.wire.exchange import ComplaintError, Exchanges, Inboxes, Lost, PeerLostError
from planaria.node.wire.frames import (
    Codec,
    Descriptor,
    Form,
    Frame,
    NonFiniteError,
    WireError,
    check_forms,
)
from planaria.node.wire.largest import row_bytes
from planaria.node.wire.lowrank import Cut, Shape, counts, cuts, encoded_bytes, row_start

if TYPE_CHECKING:
    from torch import Tensor

    from planaria.node.run_file import WireSection

log = logging.getLogger(__name__)

PIECE: Final = 2 << 20  # values of a part that travel in one frame: 8 MiB of float32
EARLY_LIMIT: Final = 2 << 30  # bytes kept of one peer that is ahead of this node
NAMED: Final = 8  # microbatches, or characters of what is unknown, in an error message

LATE: Final = 1 << 62
"""A step after all that is otherwise in a run's first ones."""

Outgoing: TypeAlias = list[tuple[str, Frame]]  # frames, each with the node it goes to
Coded: TypeAlias = tuple[list[Descriptor], tuple[memoryview, ...]]
Averaged: TypeAlias = Codec | Literal["topk", "lowrank"]

LAGGING: Final[tuple[Averaged, ...]] = "topk", "lowrank"
"""What these leave out comes many steps later."""


def feeds_back(codec: Averaged) -> bool:
    """What it leaves out is held back for the next step."""
    return codec in ("int8", "int4", *LAGGING)


@dataclass(frozen=True)
class Coding:
    """How parts of a gradient travel: in a codec, or a share of them, the largest, or by factors of
    its matrices."""

    tensors: Tensors
    codec: Averaged = "none"
    share: float = 1.0  # of the values, that travel in topk; of lowrank about as many
    after: int = 0  # so many steps of the run, in which these two are int8
    rank: int = 1  # of lowrank
    shapes: tuple[Shape, ...] = ()  # of the parameters that the gradient is of, end to end

    @classmethod
    def of_run(cls, tensors: Tensors, wire: WireSection, shapes: Iterable[Shape]) -> Coding:
        """As the run file has it."""
        shapes, share = tuple(shapes), wire.topk
        if wire.averaging == "lowrank":
            size = sum(map(math.prod, shapes))
            sent = sum(counts(cuts(shapes, wire.rank, 0, size), wire.rank))
            share = sent / size if size else 1.0
        return cls(tensors, wire.averaging, share, wire.averaging_after, wire.rank, shapes)

    def at(self, step: int) -> Coding:
        """In that step. A run's first steps are where its gradients change fastest, so little of
        them would come in time (Lin et al., ICLR 2018, section 3.3)."""
        early = self.codec in LAGGING and step <= self.after
        return replace(self, codec="int8") if early else self

    @property
    def settles(self) -> int:
        """Steps until what a replica holds back is as much as it ever will be."""
        return math.ceil(2 / self.share) if self.codec in LAGGING else 0

    def encode(self, row: Tensor, start: int) -> Coded:
        """The gradient's values from `start` on."""
        if self.codec == "topk":
            return self.tensors.encode_largest(row, self.share)
        if self.codec == "lowrank":
            return self.tensors.encode_low_rank(row, self._cuts(row, start), self.rank)
        return self.tensors.encode([row], self.codec)

    def decode(self, frame: Frame, like: Tensor, start: int) -> Tensor:
        """Of the length of `like`, and where that is. Raises WireError."""
        descriptors, payload = frame.descriptors, frame.payload
        size, device = like.numel(), like.device
        if self.codec == "topk":
            return self.tensors.decode_largest(descriptors, payload, size, self.share, device)
        if self.codec == "lowrank":
            some = self._cuts(like, start)
            return self.tensors.decode_low_rank(descriptors, payload, size, some, self.rank, device)
        check_forms(descriptors, [Form("float32", tuple(like.shape), self.codec)])
        (row,) = self.tensors.decode(descriptors, payload, device)
        return row

    def spans(self, size: int, replicas: int) -> list[list[tuple[int, int]]]:
        """Of the parts of a gradient of that size, and their pieces."""
        return spans(size, replicas, self.shapes if self.codec == "lowrank" else ())

    def _cuts(self, row: Tensor, start: int) -> list[Cut]:
        return cuts(self.shapes, self.rank, start, row.numel())


def spans(size: int, replicas: int, matrices: Sequence[Shape] = ()) -> list[list[tuple[int, int]]]:
    """Where the pieces of each replica's part of a gradient begin and end; the rows of `matrices`
    stay whole. An empty part is one empty piece, for the ids go with a piece."""
    bounds = [*(row_start(matrices, size * i // replicas) for i in range(replicas)), size]
    firsts = [
        [row_start(matrices, first) for first in range(start, max(start + 1, stop), PIECE)]
        for start, stop in pairwise(bounds)
    ]
    return [list(pairwise((*of, stop))) for of, stop in zip(firsts, bounds[1:], strict=True)]


def gradient_bytes(wire: WireSection, shapes: Iterable[Shape], replicas: int) -> int:
    """Of the whole gradient of parameters of these shapes, sent once, in so many parts."""
    if wire.averaging == "lowrank":
        return _factor_bytes(tuple(shapes), wire.rank, replicas)
    return row_bytes(sum(map(math.prod, shapes)), wire.averaging, wire.topk)


@lru_cache(maxsize=64)  # a search for a plan asks again and again
def _factor_bytes(shapes: tuple[Shape, ...], rank: int, replicas: int) -> int:
    parts = spans(sum(map(math.prod, shapes)), replicas, shapes)
    return encoded_bytes(shapes, rank, chain.from_iterable(parts))


def check_ids(shares: Mapping[str, Collection[int]], window: int) -> None:
    """Each of the microbatches 0..window-1 is in exactly one replica's share, once.

    Raises ComplaintError that names the ids that are not, and accuses who holds them.
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
        raise ComplaintError(
            f"the stage's gradient is not that of the window's {window} microbatches; "
            + "; ".join(faults),
            accused,
            NUMBERS,
        )


def _name_ids(ids: Sequence[int], holders: Mapping[int, Sequence[str]]) -> str:
    named = [f"{i} ({', '.join(holders[i])})" if i in holders else str(i) for i in ids[:NAMED]]
    return ", ".join(named) + (f" and {len(ids) - NAMED} more" if len(ids) > NAMED else "")


class Averaging:
    """One node's side of the reductions, one at a time.

    `send` queues a frame for a peer and says False when there is no way to it. Who cancels a
    reduction may touch the gradient in the compute thread, behind the reduction's last work there.
    """

    def __init__(
        self,
        node: str,
        exchanges: Exchanges,
        send: Callable[[str, Frame], bool],
        coding: Coding,
        limit: int = EARLY_LIMIT,
        *,
        chance: Random | None = None,
    ) -> None:
        """`limit`: bytes of one peer that wait, before a reduction and in it. `chance`: by which is
        drawn what is looked at closely; None: nothing is."""
        self._node, self._chance = node, chance
        self._exchanges = exchanges
        self._send = send
        self._coding = coding
        self.held_back = HeldBack()
        self._together: Counter[str] = Counter()  # reductions in a row, by who was in them
        self._inboxes: Inboxes[Ballot, Frame] = Inboxes(exchanges, NEVER, limit, limit)

    async def reduce(
        self,
        ballot: Ballot,
        replicas: Sequence[str],
        gradient: Tensor,
        ids: Collection[int],
        window: int,
        deadline: float,
        non_finite: bool = False,
        step: int = LATE,
    ) -> list[Contribution]:
        """Replace `gradient` (float32 [n]) by its sum over `replicas`, in place.

        `replicas` are the stage's members, this node among them; `ids` the microbatches that this
        node's gradient is of; `window` their number over all replicas. `deadline` bounds, in
        seconds, how long frames of others are waited for. With `non_finite`, gradients need not be
        finite: that is the model's doing then. `step`: of the run, a late one by default.

        Returns what is to be said of the replicas' contributions, as seen in one piece.

        Takes about twice the gradient's memory, one half of it for what waits to be sent, and
        twice more for what is held back, where something is.
        Raises ComplaintError, PeerLostError when the gradients can still be summed without the
        accused, and ValueError for arguments that can't be meant. Once it has failed or is
        cancelled the gradient's contents are void.
        """
        until = self._exchanges.now + deadline
        coding = self._coding.at(step)
        settled = coding.codec != "topk" or step - coding.after >= coding.settles
        together = {n for n in replicas if self._together[n] >= coding.settles}
        reduction = Reduction(
            self._node,
            ballot,
            replicas,
            gradient,
            ids=ids,
            window=window,
            coding=coding,
            held_back=self.held_back,
            non_finite=non_finite,
            chance=self._chance,
            comparable=together if settled else (),
        )
        try:
            with self._inboxes.open(ballot) as inbox:
                await self._compute(reduction.start)
                for number in range(reduction.pieces):
                    await self._compute(partial(reduction.contribute, number))
                while awaited := reduction.awaited():
                    phase, nodes = awaited
                    try:
                        peer, item = await inbox.take(until)
                    except TimeoutError:
                        raise ComplaintError(
                            f"after {deadline:g} s the {phase} of {', '.join(nodes)} is not there",
                            nodes,
                        ) from None
                    await self._absorb(reduction, peer, item)
        finally:
            self.forget(Ballot(ballot.view, ballot.attempt + 1))
        self._together = Counter({n: self._together[n] + 1 for n in reduction.nodes})
        return reduction.contributions_seen

    def on_frame(self, peer: str, frame: Frame) -> None:
        """A frame of kind "average" has come. It waits for its reduction if that is to start yet;
        if it is over or void, the frame has no effect."""
        self._inboxes.put(Ballot(*frame.ballot), peer, frame, frame.size)

    def on_peer_lost(self, peer: str, reason: str) -> None:
        """The link to `peer` is gone: the reduction fails if it still needs something from there.

        Frames that have come before are still good."""
        self._inboxes.lost(peer, reason)

    def forget(self, before: Ballot) -> None:
        """Ballots older than `before` are void: what comes for them has no effect."""
        self._inboxes.forget(before)

    async def _absorb(self, reduction: Reduction, peer: str, item: Frame | Lost) -> None:
        if isinstance(item, Lost):
            if reduction.needs(peer):
                why = f"lost {peer} before its sums were here: {item.reason}"
                raise PeerLostError(why, [peer], item.cause)
        elif peer in reduction.ranks:
            await self._compute(partial(reduction.absorb, peer, item))
        else:
            log.warning("dropped a gradient from %s, no replica of this stage", peer)

    async def _compute(self, work: Callable[[], Outgoing]) -> None:
        for peer, frame in await self._exchanges.compute(work):
            if not self._send(peer, frame):
                raise PeerLostError(f"there is no link to {peer}", [peer])


class Reduction:
    """The arithmetic of one reduction at one node: frames in, frames out. All of it runs in the
    compute thread, but for the questions `awaited` and `needs`, asked between two of its tasks.

    Frames, by `fields`: {"phase": "contribution", "piece": k}, to the owner of a part, the first
    one with "ids"; {"phase": "sum", "piece": k}, from the owner to all.
    """

    def __init__(
        self,
        node: str,
        ballot: Ballot,
        replicas: Sequence[str],
        gradient: Tensor,
        *,
        ids: Collection[int],
        window: int,
        coding: Coding,
        held_back: HeldBack | None = None,
        non_finite: bool = False,
        chance: Random | None = None,
        comparable: Collection[str] = (),
    ) -> None:
        """`held_back`: where the coding feeds back. `comparable`: replicas whose contributions may
        be looked at; by `chance` is drawn what is.

        Raises ValueError, and ComplaintError when this node is alone and ids are wrong."""
        if len(gradient.shape) != 1 or gradient.dtype != coding.tensors.empty(0).dtype:
            raise ValueError(
                "a gradient to be averaged is one row of float32, not "
                f"{gradient.dtype} {tuple(gradient.shape)}"
            )
        self.nodes = sorted(replicas)
        self.ranks = {name: rank for rank, name in enumerate(self.nodes)}
        if node not in self.ranks or len(self.ranks) < len(self.nodes):
            raise ValueError(f"replicas {self.nodes} don't name {node} and each other once")
        self.node, self.rank = node, self.ranks[node]
        self.ballot, self.window = ballot, window
        self.coding, self.non_finite = coding, non_finite
        self.spans = coding.spans(gradient.numel(), len(self.nodes))
        self.gradient, self.parts = gradient.detach(), self._split(gradient.detach())
        self.held_back = held_back if feeds_back(coding.codec) else None
        self.owed: list[list[Tensor]] = []  # what is held back since the last commit; as `parts`
        self.owing: list[list[Tensor]] = []  # ... and since the coming one
        self.shares: dict[str, Collection[int]] = {node: sorted(ids)}
        own = self.parts[self.rank]
        self.totals: list[Tensor | None] = [None] * len(own)
        self.added = [0] * len(own)  # replicas whose contribution is in the total
        self.early: dict[tuple[int, int], Frame] = {}  # contributions by piece, rank
        others = [rank for rank in self.ranks.values() if rank != self.rank]
        self.contributions = {rank: set(range(len(own))) for rank in others}  # to come
        self.sums = {rank: set(range(len(self.parts[rank]))) for rank in others}  # to come
        self.watched = -1  # a piece
        self.kept: dict[int, Tensor] = {}  # by rank, what was given to it
        self.contributions_seen: list[Contribution] = []
        known = [name for name in self.nodes if name in comparable]
        if chance is not None and len(known) >= COMPARABLE:
            self.watched = chance.randrange(len(own))
            self.looked_at = {self.ranks[name] for name in looked_at(node, known)}
        if not others:
            check_ids(self.shares, window)

    @property
    def pieces(self) -> int:
        """How many pieces the part has that has most of them."""
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

    def start(self) -> Outgoing:
        """Before all else in the compute thread."""
        if self.held_back is None:
            return []
        if not self.contributions:
            self.held_back.begin_alone(self.ballot)
            return []
        if self.held_back.row is not None:
            self.owed = self._split(self.held_back.row)
        self.owing = self._split(self.held_back.begin(self.ballot, self.gradient))
        return []

    def contribute(self, piece: int) -> Outgoing:
        """This node's values of the piece of every other part, to the part's owner."""
        outgoing = []
        # Everyone starts with its successor, so that not all send to the same owner at once.
        for rank in (*range(self.rank + 1, len(self.nodes)), *range(self.rank)):
            if piece >= len(self.parts[rank]):
                continue
            # A copy: what waits to be sent must not change, whatever becomes of the gradient.
            values = self._given(rank, piece).clone()
            frame, _ = self._coded("contribution", piece, rank, values)
            if piece == 0:
                frame.fields["ids"] = self.shares[self.node]
            outgoing.append((self.nodes[rank], frame))
        return outgoing

    def absorb(self, peer: str, frame: Frame) -> Outgoing:
        """Take in a replica's frame; the sums that it completes are to be sent.

        Raises ComplaintError for a frame that can't be right, and for ids that aren't the window's.
        """
        phase, piece, rank = frame.fields.get("phase"), frame.fields.get("piece"), self.ranks[peer]
        missing = {"contribution": self.contributions, "sum": self.sums}.get(str(phase), {})
        if type(piece) is not int or piece not in missing.get(rank, ()):
            what = f"piece {str(piece)[:NAMED]} of phase {str(phase)[:NAMED]}"
            raise ComplaintError(f"{peer} sent {what} unasked", [peer], NUMBERS)
        missing[rank].discard(piece)
        if phase == "sum":
            self.parts[rank][piece].copy_(self._values(peer, frame, rank, piece))
            return []
        if piece == 0:
            self._note_ids(peer, frame.fields.get("ids"))
        self.early[piece, rank] = frame
        return self._add(piece)

    def _note_ids(self, peer: str, ids: Any) -> None:
        if not isinstance(ids, list) or not all(type(i) is int for i in ids):
            what = f"a {type(ids).__name__}, no list of numbers"
            raise ComplaintError(f"{peer} names its microbatches by {what}", [peer], NUMBERS)
        self.shares[peer] = ids
        if len(self.shares) == len(self.nodes):
            check_ids(self.shares, self.window)

    def _add(self, piece: int) -> Outgoing:
        """Add to a piece's total what is there in the order of ranks."""
        own = self.parts[self.rank][piece]
        while (rank := self.added[piece]) < len(self.nodes):
            if rank == self.rank:
                values = self._given(rank, piece)
            elif frame := self.early.pop((piece, rank), None):
                values = self._values(self.nodes[rank], frame, self.rank, piece)
            else:
                return []
            if piece == self.watched and rank in self.looked_at:
                self.kept[rank] = values.clone()
            total = self.totals[piece]
            self.totals[piece] = values.clone() if total is None else total.add_(values)
            self.added[piece] += 1
        total, self.totals[piece] = self.totals[piece], None
        assert total is not None
        if piece == self.watched:
            self._look(piece, total)
        frame, sent = self._coded("sum", piece, self.rank, total)
        own.copy_(sent)  # with a lossy codec: what the others will have
        return [(self.nodes[rank], frame) for rank in self.sums]

    def _given(self, rank: int, piece: int) -> Tensor:
        """What this node has for a piece, with what it has held back of it."""
        values = self.parts[rank][piece]
        return values + self.owed[rank][piece] if self.owed else values

    def _look(self, piece: int, total: Tensor) -> None:
        """At what each replica has added to this piece, as it comes from others: whole, what this
        one adds would be no measure for what they send."""
        if self.owing:
            whole = self._given(self.rank, piece)
            frame = self._frame("contribution", piece, self.rank, whole)
            as_sent = self.coding.decode(frame, whole, self.spans[self.rank][piece][0])
            total = total - whole + as_sent
            if self.rank in self.kept:
                self.kept[self.rank] = as_sent
        counts = {rank: len(self.shares.get(node, ())) for node, rank in self.ranks.items()}
        for rank, values in self.kept.items():
            squared = float(values @ values)
            seen = Contribution(
                node=self.nodes[rank],
                squared_norm=squared,
                projection=float(values @ total) - squared,
                microbatches=counts[rank],
                others=sum(counts.values()) - counts[rank],
            )
            self.contributions_seen.append(seen)
        self.kept.clear()

    def _coded(
        self, phase: Literal["contribution", "sum"], piece: int, rank: int, values: Tensor
    ) -> tuple[Frame, Tensor]:
        """And what those who get it will have; the rest is held back."""
        frame = self._frame(phase, piece, rank, values)
        if self.coding.codec == "none" or not (self.owing or phase == "sum"):
            return frame, values
        sent = self.coding.decode(frame, values, self.spans[rank][piece][0])
        if self.owing:
            self.owing[rank][piece].copy_(values).sub_(sent)
        return frame, sent

    def _frame(self, phase: str, piece: int, rank: int, values: Tensor) -> Frame:
        fields = {"phase": phase, "piece": piece}
        coded = self.coding.encode(values, self.spans[rank][piece][0])
        return Frame("average", self.ballot, fields, *coded)

    def _values(self, peer: str, frame: Frame, rank: int, piece: int) -> Tensor:
        """Of that piece of the part that this rank owns."""
        try:
            like = self.parts[rank][piece]
            values = self.coding.decode(frame, like, self.spans[rank][piece][0])
            if not (self.non_finite or self.coding.tensors.finite(values)):
                raise NonFiniteError("it is not finite")
        except WireError as error:
            reason = f"{peer} sent a bad gradient: {error}"
            raise ComplaintError(reason, [peer], error.cause) from error
        return values

    def _split(self, row: Tensor) -> list[list[Tensor]]:
        """Views of each rank's pieces."""
        return [[row[start:stop] for start, stop in of] for of in self.spans]
