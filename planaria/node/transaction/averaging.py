"""Replicas of a stage sum their gradients: a reduce-scatter, then an all-gather.

With R replicas, sorted by node id, replica i owns the i-th of R equal parts of the flat gradient.
Each replica sends its values of a part to the owner. The owner adds them in the order of the node
ids and sends the sum to all. The order of arrival changes nothing, and with a lossy codec the owner
also goes on with the decoded bits: replicas stay bit-identical. Error feedback (error_feedback.py)
adds what int8 and lowrank leave out, of a contribution and of a sum, to the next step.

More than eight replicas are laid out in rows (bootstrap/neighbours.py). Each then needs about 2
sqrt(R) links instead of R. In each row the same parts have an owner, which adds up its row's
contributions. The owners of a part, one a row, then reduce-scatter the rows' sums, in the order of
the rows. Each sends its share's sum to the other owners, which pass the very same bytes on to their
rows. That is four hops instead of two, and as many bytes in all. Where row lengths differ, the last
node of a longer row owns nothing.

A gradient is already a sum over tokens divided by the tokens of the whole window. So the replicas'
gradients add up without weights, whatever share of the window each has computed.

The first piece of each contribution names its microbatches. Every replica owns a part, so it sees
all names and checks that the stage applied each microbatch once. Between rows, one node of each row
sends its row's names with a sum. A node of that row that received other names detects the
difference.

Non-finite values are traced to their sender: a contribution is checked before it enters a sum. So a
non-finite sum is its sender's fault.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import chain, pairwise
from random import Random
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

from planaria.bootstrap.neighbours import lengths, places, row_of, rows
from planaria.bootstrap.registry_pb2 import DIVERGENCE, NUMBERS
from planaria.node.ports import Tensors
from planaria.node.transaction.effects import NEVER, Ballot
from planaria.node.transaction.error_feedback import ErrorFeedback
from planaria.node.transaction.gradient_outliers import COMPARABLE, Contribution, looked_at
from planaria.node.wire.exchange import ComplaintError, Exchanges, Inboxes, Lost, PeerLostError
from planaria.node.wire.frames import (
    Codec,
    Descriptor,
    Form,
    Frame,
    NonFiniteError,
    WireError,
    buffers_of,
    check_forms,
    encoded_size,
)
from planaria.node.wire.lowrank import Cut, Shape, counts, cuts, encoded_bytes, row_start

if TYPE_CHECKING:
    from torch import Tensor

    from planaria.node.run_file import WireSection

log = logging.getLogger(__name__)

PIECE: Final = 2 << 20  # values of a part in one frame: 8 MiB of float32
EARLY_LIMIT: Final = 2 << 30  # bytes kept of one peer that is ahead of this node
NAMED: Final = 8  # microbatches, or characters of an unknown value, in an error message
LATER: Final = 2.0
"""Extra seconds before an accusation, for each hop behind a row's contributions: nodes nearer to
the cause then report first."""

LATE: Final = 1 << 62
"""A step later than a run's first ones."""

Outgoing: TypeAlias = list[tuple[str, Frame]]  # frames, each with its receiver
Coded: TypeAlias = tuple[list[Descriptor], tuple[memoryview, ...]]
Averaged: TypeAlias = Codec | Literal["lowrank"]


def feeds_back(codec: Averaged) -> bool:
    """Whether error feedback adds what the codec leaves out to the next step."""
    return codec in ("int8", "int4", "lowrank")


@dataclass(frozen=True)
class Coding:
    """How parts of a gradient travel: in a codec, or as factors of its matrices."""

    tensors: Tensors
    codec: Averaged = "none"
    share: float = 1.0  # approximate share of the values that travel in lowrank
    after: int = 0  # number of first steps that use int8 instead of lowrank
    rank: int = 1  # of lowrank
    shapes: tuple[Shape, ...] = ()  # of the parameters whose flat gradients are concatenated

    @classmethod
    def of_run(cls, tensors: Tensors, wire: WireSection, shapes: Iterable[Shape]) -> Coding:
        """The coding that the run file asks for."""
        shapes, share = tuple(shapes), 1.0
        if wire.averaging == "lowrank":
            size = sum(map(math.prod, shapes))
            sent = sum(counts(cuts(shapes, wire.rank, 0, size), wire.rank))
            share = sent / size if size else 1.0
        return cls(tensors, wire.averaging, share, wire.averaging_after, wire.rank, shapes)

    def at(self, step: int) -> Coding:
        """The coding of that step. A run's gradients change fastest in its first steps, so little
        of them would come in time (Lin et al., ICLR 2018, section 3.3)."""
        early = self.codec == "lowrank" and step <= self.after
        return replace(self, codec="int8") if early else self

    @property
    def settles(self) -> int:
        """Steps until a replica's error feedback is as large as it ever will be."""
        return math.ceil(2 / self.share) if self.codec == "lowrank" else 0

    def encode(self, row: Tensor, start: int) -> Coded:
        """Encodes the gradient's values from `start` on."""
        if self.codec == "lowrank":
            return self.tensors.encode_low_rank(row, self._cuts(row, start), self.rank)
        return self.tensors.encode([row], self.codec)

    def decode(self, frame: Frame, like: Tensor, start: int) -> Tensor:
        """Decodes to the length and device of `like`. Raises WireError."""
        descriptors, payload = frame.descriptors, frame.payload
        size, device = like.numel(), like.device
        if self.codec == "lowrank":
            some = self._cuts(like, start)
            return self.tensors.decode_low_rank(descriptors, payload, size, some, self.rank, device)
        check_forms(descriptors, [Form("float32", tuple(like.shape), self.codec)])
        (row,) = self.tensors.decode(descriptors, payload, device)
        return row

    def spans(self, size: int, parts: int) -> list[list[tuple[int, int]]]:
        """Spans of the pieces of so many parts of a gradient of that size."""
        return spans(size, parts, self.shapes if self.codec == "lowrank" else ())

    def _cuts(self, row: Tensor, start: int) -> list[Cut]:
        return cuts(self.shapes, self.rank, start, row.numel())


def spans(size: int, parts: int, matrices: Sequence[Shape] = ()) -> list[list[tuple[int, int]]]:
    """Begin and end of each piece, for so many parts of a gradient; rows of `matrices` stay whole.
    An empty part is one empty piece, because ids travel with a piece."""
    bounds = [*(row_start(matrices, size * i // parts) for i in range(parts)), size]
    firsts = [
        [row_start(matrices, first) for first in range(start, max(start + 1, stop), PIECE)]
        for start, stop in pairwise(bounds)
    ]
    return [list(pairwise((*of, stop))) for of, stop in zip(firsts, bounds[1:], strict=True)]


def gradient_bytes(wire: WireSection, shapes: Iterable[Shape], replicas: int) -> int:
    """Bytes of the gradient of parameters of these shapes, sent once, in the parts for so many
    replicas."""
    if wire.averaging == "lowrank":
        return _factor_bytes(tuple(shapes), wire.rank, replicas)
    return encoded_size(sum(map(math.prod, shapes)), "float32", wire.averaging)


@lru_cache(maxsize=64)  # a plan search calls it repeatedly
def _factor_bytes(shapes: tuple[Shape, ...], rank: int, replicas: int) -> int:
    of = spans(sum(map(math.prod, shapes)), parts(replicas), shapes)
    return encoded_bytes(shapes, rank, chain.from_iterable(of))


def parts(replicas: int) -> int:
    """Number of parts of a gradient: owners in a row, times the number of rows."""
    some = lengths(replicas)
    return len(some) * min(some)


def check_ids(
    shares: Mapping[str, Collection[int]],
    window: int,
    reported_by: Mapping[str, str] | None = None,
    whole: bool = True,
) -> None:
    """Checks that each microbatch 0..window-1 is in exactly one replica's share, once. If the
    shares aren't `whole`, it may be in none.

    Raises ComplaintError that names the wrong ids and accuses their holders or, by `tellers`, the
    nodes that reported them.
    """
    holders: dict[int, list[str]] = {}
    for node, ids in sorted(shares.items()):
        for microbatch in ids:
            holders.setdefault(microbatch, []).append(node)
    unknown = sorted(i for i in holders if not 0 <= i < window)
    twice = sorted(i for i, nodes in holders.items() if len(nodes) > 1)
    missing = [i for i in range(window) if whole and i not in holders]
    faults = []
    if unknown:
        faults.append(f"not of this window: {_name_ids(unknown, holders)}")
    if twice:
        faults.append(f"more than once: {_name_ids(twice, holders)}")
    if missing:
        faults.append(f"in nobody's gradient: {_name_ids(missing, holders)}")
    if faults:
        reporters = reported_by or {}
        accused = {reporters.get(node, node) for i in unknown + twice for node in holders[i]}
        raise ComplaintError(
            f"the stage's gradient is not that of the window's {window} microbatches; "
            + "; ".join(faults),
            accused,
            NUMBERS,
        )


def _name_ids(ids: Sequence[int], holders: Mapping[int, Sequence[str]]) -> str:
    named = [f"{i} ({', '.join(holders[i])})" if i in holders else str(i) for i in ids[:NAMED]]
    return ", ".join(named) + (f" and {len(ids) - NAMED} more" if len(ids) > NAMED else "")


@dataclass(frozen=True)
class ReductionRound:
    """One reduction, on whose terms all replicas agree."""

    node: str  # this one
    ballot: Ballot
    replicas: Sequence[str]  # of the stage, including this node
    window: int  # microbatches of the step, over all replicas
    step: int = LATE  # of the run
    non_finite: bool = False  # gradients need not be finite, since the model causes that
    last: bytes = b""  # hash of the commit that the replicas applied last


class Averaging:
    """One node's side of the reductions, one at a time.

    `send` queues a frame for a peer and returns False without a route. After a cancellation, touch
    the gradient only in the compute thread, behind the reduction's last work there.
    """

    def __init__(
        self,
        exchanges: Exchanges,
        send: Callable[[str, Frame], bool],
        coding: Coding,
        limit: int = EARLY_LIMIT,
        *,
        chance: Random | None = None,
    ) -> None:
        """`limit`: bytes of one peer that wait, before a reduction and in it. `chance`: draws the
        piece whose contributions are examined; None: none is."""
        self._chance = chance
        self._exchanges = exchanges
        self._send = send
        self._coding = coding
        self.feedback = ErrorFeedback()
        self._together: Counter[str] = Counter()  # consecutive reductions, by replica
        self._inboxes: Inboxes[Ballot, Frame] = Inboxes(exchanges, NEVER, limit, limit)

    async def reduce(
        self, round: ReductionRound, gradient: Tensor, ids: Collection[int], patience: float
    ) -> list[Contribution]:
        """Replace `gradient` (float32 [n]) by its sum over the replicas, in place.

        `ids`: microbatches in this node's gradient. `patience`: seconds to wait for the next frame
        after `hurry`; until then others may still compute.

        Returns statistics of the replicas' contributions, as seen in one piece.

        Takes about twice the gradient's memory, half of it for frames to be sent, and twice more
        for error feedback, if any.

        Raises ComplaintError, PeerLostError when the gradients can still be summed without the
        accused, and ValueError for invalid arguments. After failure or cancellation the gradient's
        contents are void.
        """
        coding, ballot = self._coding.at(round.step), round.ballot
        together = {n for n in round.replicas if self._together[n] >= coding.settles}
        feedback = self.feedback if feeds_back(coding.codec) else None
        reduction = Reduction(round, gradient, ids, coding, feedback, self._chance, together)
        try:
            with self._inboxes.open(ballot) as inbox:
                await self._compute(reduction.start)
                for number in range(reduction.pieces):
                    await self._compute(partial(reduction.contribute, number))
                while awaited := reduction.awaited():
                    phase, nodes, hops = awaited
                    seconds = patience + LATER * hops
                    try:
                        peer, item = await inbox.take(patience=seconds)
                    except TimeoutError:
                        whose = ", ".join(nodes)
                        raise ComplaintError(
                            f"waited {seconds:g} s in vain for the {phase} of {whose}", nodes
                        ) from None
                    await self._absorb(reduction, peer, item)
        finally:
            self.forget(Ballot(ballot.view, ballot.attempt + 1))
        self._together = Counter({n: self._together[n] + 1 for n in reduction.nodes})
        return reduction.contributions_seen

    def on_frame(self, peer: str, frame: Frame) -> None:
        """Handles a frame of kind "average". It waits if its reduction hasn't started; if that is
        over or void, the frame has no effect."""
        self._inboxes.put(Ballot(*frame.ballot), peer, frame, frame.size)

    def hurry(self, ballot: Ballot) -> None:
        """All input of the reduction has been computed, so waits are limited from now on."""
        self._inboxes.hurry(ballot)

    def on_peer_lost(self, peer: str, reason: str) -> None:
        """The link to `peer` is lost: the reduction fails if it still needs data from it.

        Frames that have come before stay valid."""
        self._inboxes.lost(peer, reason)

    def forget(self, before: Ballot) -> None:
        """Ballots older than `before` are void: their frames have no effect."""
        self._inboxes.forget(before)

    async def _absorb(self, reduction: Reduction, peer: str, item: Frame | Lost) -> None:
        if isinstance(item, Lost):
            if reduction.needs(peer):
                why = f"lost {peer} before its sums were here: {item.reason}"
                raise PeerLostError(why, [peer], item.cause)
        elif peer in reduction.nodes:
            await self._compute(partial(reduction.absorb, peer, item))
        else:
            log.warning("dropped a gradient from %s, no replica of this stage", peer)

    async def _compute(self, work: Callable[[], Outgoing]) -> None:
        for peer, frame in await self._exchanges.compute(work):
            if not self._send(peer, frame):
                raise PeerLostError(f"there is no link to {peer}", [peer])


class GradientPiece(NamedTuple):
    """The values of a gradient from `start` to before `stop`."""

    start: int
    stop: int
    home: int  # the row whose owner makes the sum
    names: bool = False  # whether its sum carries the names of that row's microbatches

    def of(self, row: Tensor) -> Tensor:
        return row[self.start : self.stop]


class AwaitedReplicas(NamedTuple):
    phase: str
    nodes: list[str]
    hops: int  # behind contributions, where there are several rows


Phase: TypeAlias = Literal["contribution", "row sum", "sum"]


@dataclass
class Total:
    """A sum in a fixed order of terms that arrive in any order."""

    added: int = 0  # number of terms added
    value: Tensor | None = None
    early: dict[str, Frame | Tensor] = field(default_factory=dict)  # by node


class Reduction:
    """The arithmetic of one reduction at one node: frames in, frames out. All of it runs in the
    compute thread, except `awaited` and `needs`, which are called between two tasks.

    A frame's `fields` have phase, piece and "last", the hash of the commit that the sender applied
    last: replicas that applied different commits don't sum. {"phase": "contribution", "piece": k}
    goes to the owner of a part in the row; the first one has "ids". {"phase": "row sum", "piece":
    k} goes from there to the owner that makes the sum. {"phase": "sum", "piece": k} goes from that
    owner to its row and to the other owners, which pass it to their rows. Piece numbers are the
    owner's: the receiver's in the first two phases, the sender's in a sum.
    """

    def __init__(
        self,
        round: ReductionRound,
        gradient: Tensor,
        ids: Collection[int],
        coding: Coding,
        feedback: ErrorFeedback | None = None,
        chance: Random | None = None,
        comparable: Collection[str] = (),
    ) -> None:
        """`feedback`: given if the coding has error feedback. `comparable`: replicas whose
        contributions may be examined; `chance` draws the piece.

        Raises ValueError, and ComplaintError when this node is alone and ids are wrong."""
        if len(gradient.shape) != 1 or gradient.dtype != coding.tensors.empty(0).dtype:
            raise ValueError(
                "a gradient to be averaged is one row of float32, not "
                f"{gradient.dtype} {tuple(gradient.shape)}"
            )
        node, self.nodes = round.node, sorted(round.replicas)
        if node not in self.nodes or len(set(self.nodes)) < len(self.nodes):
            raise ValueError(f"replicas {self.nodes} don't name {node} and each other once")
        self.node, self.round, self.ballot = node, round, round.ballot
        self.gradient, self.coding, self.feedback = gradient.detach(), coding, feedback
        self.owed: Tensor | None = None  # error feedback of the last commit
        self.owing: Tensor | None = None  # error feedback of the coming commit
        self._lay_out()
        self._await_all()
        self.totals: dict[tuple[Phase, int], Total] = defaultdict(Total)
        self.shares: dict[str, list[int]] = {node: sorted(ids)}
        self.tellers = {node: node}  # by node: the sender of its share
        self.watched = -1  # index of the examined piece
        self.kept: dict[str, Tensor] = {}  # by node, the contribution received
        self.contributions_seen: list[Contribution] = []
        known = [name for name in self.row if name in comparable]
        if chance is not None and self.own and len(known) >= COMPARABLE:
            self.watched = chance.randrange(len(self.own))
            self.looked_at = looked_at(node, known)
        if len(self.nodes) == 1:
            check_ids(self.shares, round.window)

    def _lay_out(self) -> None:
        """Computes the owners of the parts that concern this node."""
        self.rows = rows(self.nodes)
        count, parts = len(self.rows), places(self.rows)
        self.row = row_of(self.node, self.rows)  # includes this node, as does `column`
        self.home = self.rows.index(self.row)
        place = self.row.index(self.node)
        self.column = [row[place] for row in self.rows] if place < parts else [self.node]
        shares = self.coding.spans(self.gradient.numel(), parts * count)

        def owned(row: int, place: int) -> list[GradientPiece]:
            """Pieces whose sums this owner makes come first."""
            return [
                GradientPiece(start, stop, home, count > 1 and first == 0 and home % parts == place)
                for home in (*range(row, count), *range(row))
                for first, (start, stop) in enumerate(shares[place * count + home])
            ]

        self.pieces_of = {name: owned(self.home, p) for p, name in enumerate(self.row[:parts])}
        if place < parts:
            self.pieces_of |= {name: owned(n, place) for n, name in enumerate(self.column)}
        self.own = self.pieces_of.get(self.node, [])

    def _await_all(self) -> None:
        """Lists the expected pieces: numbers, by node."""
        mates, owners = self._others(self.row), self._others(self.column)
        made_here = {number for number, piece in enumerate(self.own) if piece.home == self.home}
        self.contributions = {node: set(range(len(self.own))) for node in mates}
        self.row_sums = {node: set(made_here) for node in owners}
        self.to_pass_on = {  # sums of this node's parts, by the owners that make them
            node: {
                number for number, piece in enumerate(self.pieces_of[node]) if piece.home == home
            }
            for home, node in enumerate(self.column)
            if node in owners
        }
        self.sums = {node: set(range(len(self.pieces_of.get(node, [])))) for node in mates}

    def _others(self, some: Iterable[str]) -> list[str]:
        return [node for node in some if node != self.node]

    @property
    def pieces(self) -> int:
        """Number of pieces in the largest part."""
        return max(len(self.pieces_of.get(node, [])) for node in self.row) if self.sums else 0

    def awaited(self) -> AwaitedReplicas | None:
        """What is missing, and from which nodes; None: the gradient is the sum.

        A node without all contributions can't send sums, so contributions are reported first."""
        hops: Sequence[tuple[Phase, Mapping[str, set[int]]]] = (
            ("contribution", self.contributions),
            ("row sum", self.row_sums),
            ("sum", self.to_pass_on),
            ("sum", self.sums),
        )
        for hop, (phase, missing) in enumerate(hops):
            if nodes := [node for node, pieces in missing.items() if pieces]:
                return AwaitedReplicas(phase, nodes, hop if len(self.rows) > 1 else 0)
        return None

    def needs(self, peer: str) -> bool:
        """Whether anything from `peer` is still missing."""
        missing = self.contributions, self.row_sums, self.to_pass_on, self.sums
        return any(of.get(peer) for of in missing)

    def start(self) -> Outgoing:
        """Runs before all else in the compute thread."""
        if self.feedback is None:
            return []
        if len(self.nodes) == 1:
            self.feedback.begin_alone(self.ballot)
            return []
        self.owed = self.feedback.row
        self.owing = self.feedback.begin(self.ballot, self.gradient)
        return []

    def contribute(self, number: int) -> Outgoing:
        """Sends this node's values of that piece to each owner in its row."""
        outgoing = []
        place = self.row.index(self.node)
        # Each node starts with its successor, so that they don't all send to one owner at once.
        for owner in (*self.row[place + 1 :], *self.row[:place]):
            pieces = self.pieces_of.get(owner, [])
            if number >= len(pieces):
                continue
            piece = pieces[number]
            # A copy: queued frames must not change when the gradient does.
            frame, _ = self._coded("contribution", number, piece, self._given(piece).clone())
            if number == 0:
                frame.fields["ids"] = self.shares[self.node]
            outgoing.append((owner, frame))
        return outgoing

    def absorb(self, peer: str, frame: Frame) -> Outgoing:
        """Take in a replica's frame; returns the sums that it completes, to be sent.

        Raises ComplaintError for an invalid frame, and for ids that aren't the window's.
        """
        if frame.fields.get("last") != self.round.last:
            reason = f"{peer} has applied another last commit than this node"
            raise ComplaintError(reason, [peer], DIVERGENCE)
        phase, number = frame.fields.get("phase"), frame.fields.get("piece")
        sums = self.to_pass_on if peer in self.to_pass_on else self.sums
        due = {"contribution": self.contributions, "row sum": self.row_sums, "sum": sums}
        missing = due.get(str(phase), {}).get(peer, set())
        if type(number) is not int or number not in missing:
            unexpected = f"piece {str(number)[:NAMED]} of phase {str(phase)[:NAMED]}"
            raise ComplaintError(
                f"{peer} sent {unexpected}, which was not expected", [peer], NUMBERS
            )
        missing.discard(number)
        if phase == "sum":
            return self._take_sum(peer, self.pieces_of[peer][number], frame)
        if phase == "row sum":
            self.totals["row sum", number].early[peer] = frame
            return self._add_rows(number)
        if number == 0:
            self._note_ids(peer, frame.fields.get("ids"))
        self.totals["contribution", number].early[peer] = frame
        return self._add(number)

    # --- sums

    def _add(self, number: int) -> Outgoing:
        """Adds the row's contributions to a piece; a complete sum goes to the owner that adds all
        rows."""
        total = self._add_up("contribution", number, self.row)
        if total is None:
            return []
        piece = self.own[number]
        if number == self.watched:
            self._look(piece, total)
        if len(self.rows) == 1:
            return self._tell(number, total)
        if piece.home == self.home:
            self.totals["row sum", number].early[self.node] = total
            return self._add_rows(number)
        owner = self.column[piece.home]
        frame, _ = self._coded("row sum", self.pieces_of[owner].index(piece), piece, total)
        return [(owner, frame)]

    def _add_rows(self, number: int) -> Outgoing:
        total = self._add_up("row sum", number, self.column)
        return [] if total is None else self._tell(number, total)

    def _add_up(
        self, phase: Literal["contribution", "row sum"], number: int, nodes: Sequence[str]
    ) -> Tensor | None:
        """Adds the available terms to a piece's total in node order; returns a complete total."""
        total = self.totals[phase, number]
        for node in nodes[total.added :]:
            if node == self.node and phase == "contribution":
                values = self._given(self.own[number])
            elif (term := total.early.pop(node, None)) is None:
                return None
            elif isinstance(term, Frame):
                values = self._values(node, term, self.own[number])
            else:
                values = term
            if phase == "contribution" and number == self.watched and node in self.looked_at:
                self.kept[node] = values.clone()
            total.value = values.clone() if total.value is None else total.value.add_(values)
            total.added += 1
        return self.totals.pop((phase, number)).value

    def _tell(self, number: int, total: Tensor) -> Outgoing:
        """Sends the sum of a piece."""
        piece = self.own[number]
        frame, sent = self._coded("sum", number, piece, total)
        piece.of(self.gradient).copy_(sent)  # with a lossy codec: what the others will have
        if piece.names:
            frame.fields["ids"] = {node: self.shares[node] for node in self.row}
        return [(node, frame) for node in self._others((*self.row, *self.column))]

    def _take_sum(self, peer: str, piece: GradientPiece, frame: Frame) -> Outgoing:
        """Copies a sum into the gradient; another owner's is passed on to the row unchanged."""
        piece.of(self.gradient).copy_(self._values(peer, frame, piece))
        fields: dict[str, Any] = {"phase": "sum", "last": self.round.last}
        if piece.names:
            fields["ids"] = ids = frame.fields.get("ids")
            self._note_row(peer, self.rows[piece.home], ids)
        if peer in self.sums:
            return []
        fields["piece"] = self.own.index(piece)
        coded = frame.descriptors, buffers_of(frame.payload)
        passed_on = Frame("average", self.ballot, fields, *coded)
        return [(node, passed_on) for node in self.sums]

    def _given(self, piece: GradientPiece) -> Tensor:
        """This node's values of a piece, with their error feedback."""
        values = piece.of(self.gradient)
        return values if self.owed is None else values + piece.of(self.owed)

    # --- names of microbatches

    def _note_ids(self, peer: str, ids: Any) -> None:
        if not _are_ids(ids):
            value = f"a {type(ids).__name__}, no list of numbers"
            raise ComplaintError(f"{peer} names its microbatches by {value}", [peer], NUMBERS)
        self._note(peer, {peer: ids})

    def _note_row(self, peer: str, row: Collection[str], ids_of: Any) -> None:
        named = isinstance(ids_of, dict) and ids_of.keys() == set(row)
        if not named or not all(map(_are_ids, ids_of.values())):
            value = f"a {type(ids_of).__name__}, no list of numbers for each of {', '.join(row)}"
            raise ComplaintError(f"{peer} names a row's microbatches by {value}", [peer], NUMBERS)
        self._note(peer, ids_of)

    def _note(self, teller: str, ids_of: Mapping[str, list[int]]) -> None:
        for node, ids in ids_of.items():
            if self.shares.setdefault(node, ids) != ids:
                sources = {teller, self.tellers[node]} - {self.node}
                reason = f"{' and '.join(sorted(sources))} name other microbatches of {node}"
                raise ComplaintError(f"{reason}, where they are one node's", sources, NUMBERS)
            self.tellers.setdefault(node, teller)
        whole = len(self.shares) == len(self.nodes)
        if whole or len(self.rows) > 1:
            check_ids(self.shares, self.round.window, self.tellers, whole)

    # --- statistics of contributions

    def _look(self, piece: GradientPiece, total: Tensor) -> None:
        """Records each row member's contribution to this piece in its decoded form. This node's own
        is decoded, too, to be comparable with the others'."""
        if self.owing is not None:
            whole = self._given(piece)
            frame = self._frame("contribution", self.watched, piece, whole)
            as_sent = self.coding.decode(frame, whole, piece.start)
            total = total - whole + as_sent
            if self.node in self.kept:
                self.kept[self.node] = as_sent
        counts = {node: len(self.shares.get(node, ())) for node in self.row}
        for node, values in self.kept.items():
            squared = float(values @ values)
            seen = Contribution(
                node=node,
                squared_norm=squared,
                projection=float(values @ total) - squared,
                microbatches=counts[node],
                others=sum(counts.values()) - counts[node],
            )
            self.contributions_seen.append(seen)
        self.kept.clear()

    # --- coding

    def _coded(
        self, phase: Phase, number: int, piece: GradientPiece, values: Tensor
    ) -> tuple[Frame, Tensor]:
        """Encodes values; returns what receivers will have, too. The rest is for error feedback."""
        frame = self._frame(phase, number, piece, values)
        if self.coding.codec == "none" or not (self.owing is not None or phase == "sum"):
            return frame, values
        sent = self.coding.decode(frame, values, piece.start)
        if self.owing is not None:
            piece.of(self.owing).copy_(values).sub_(sent)
        return frame, sent

    def _frame(self, phase: Phase, number: int, piece: GradientPiece, values: Tensor) -> Frame:
        fields = {"phase": phase, "piece": number, "last": self.round.last}
        return Frame("average", self.ballot, fields, *self.coding.encode(values, piece.start))

    def _values(self, peer: str, frame: Frame, piece: GradientPiece) -> Tensor:
        try:
            values = self.coding.decode(frame, piece.of(self.gradient), piece.start)
            if not (self.round.non_finite or self.coding.tensors.finite(values)):
                raise NonFiniteError("it is not finite")
        except WireError as error:
            reason = f"{peer} sent a bad gradient: {error}"
            raise ComplaintError(reason, [peer], error.cause) from error
        return values


def _are_ids(ids: Any) -> bool:
    return isinstance(ids, list) and all(type(i) is int for i in ids)
