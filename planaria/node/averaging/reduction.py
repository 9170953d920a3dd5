"""Replicas of a stage sum their gradients: a reduce-scatter, then an all-gather.

With R replicas, sorted by node id, replica i owns the i-th of R equal parts of the flat gradient.
Each replica sends its values of a part to the owner. The owner adds them in the order of the node
ids and sends the sum to all. The order of arrival changes nothing, and with a lossy codec the owner
also goes on with the decoded bits: replicas stay bit-identical. Error feedback (error_feedback.py)
adds what int8, int4 and lowrank leave out, of contributions and sums, to the next step.

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

Replicas may sign digests of what they send (evidence.py), for audits by the driver.

Non-finite values are traced to their sender: a contribution is checked before it enters a sum. So a
non-finite sum is its sender's fault.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

from planaria.bootstrap.neighbours import row_of
from planaria.bootstrap.registry_pb2 import DIVERGENCE, NUMBERS
from planaria.node.averaging.coding import Coding, GradientPiece, PieceLayout, ReductionRound
from planaria.node.averaging.error_feedback import ErrorFeedback
from planaria.node.averaging.evidence import Evidence
from planaria.node.wire.exchange import ComplaintError
from planaria.node.wire.frame_format import Frame, NonFiniteError, WireError, buffers_of

if TYPE_CHECKING:
    from torch import Tensor

NAMED: Final = 8  # microbatches, or characters of an unknown value, in an error message

OutgoingFrames: TypeAlias = list[tuple[str, Frame]]  # frames, each with its receiver


class AwaitedReplicas(NamedTuple):
    phase: str
    nodes: list[str]
    hops: int  # behind contributions, where there are several rows


Phase: TypeAlias = Literal["contribution", "row sum", "sum"]


@dataclass
class OrderedSum:
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
        evidence: Evidence | None = None,
    ) -> None:
        """`feedback`: given if the coding has error feedback. `evidence`: signs what is sent; None:
        nothing is signed.

        Raises ComplaintError when this node is alone and ids are wrong."""
        node, self.nodes = round.node, sorted(round.replicas)
        self.node, self.round, self.ballot = node, round, round.ballot
        self.gradient, self.coding, self.feedback = gradient.detach(), coding, feedback
        self.evidence = evidence
        self.owed: Tensor | None = None  # error feedback of the last commit
        self.owing: Tensor | None = None  # error feedback of the coming commit
        self._lay_out()
        self._await_all()
        self.totals: dict[tuple[Phase, int], OrderedSum] = defaultdict(OrderedSum)
        self.shares: dict[str, list[int]] = {node: sorted(ids)}
        self.tellers = {node: node}  # by node: the sender of its share
        if len(self.nodes) == 1:
            check_ids(self.shares, round.window)

    def _lay_out(self) -> None:
        """Computes the owners of the parts that concern this node."""
        layout = PieceLayout(self.nodes, self.gradient.numel(), self.coding)
        self.rows, parts = layout.rows, layout.places
        self.row = row_of(self.node, self.rows)  # includes this node, as does `column`
        self.home = self.rows.index(self.row)
        place = self.row.index(self.node)
        self.column = [row[place] for row in self.rows] if place < parts else [self.node]
        self.pieces_of = {
            name: layout.owned(self.home, p) for p, name in enumerate(self.row[:parts])
        }
        if place < parts:
            self.pieces_of |= {name: layout.owned(n, place) for n, name in enumerate(self.column)}
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
        """Number of pieces in the largest part of the gradient."""
        return max(len(self.pieces_of.get(node, [])) for node in self.row) if self.sums else 0

    def awaited(self) -> AwaitedReplicas | None:
        """What the sum lacks, and from which nodes; None: it is complete.

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
        """Whether the sum still needs anything from `peer`."""
        missing = self.contributions, self.row_sums, self.to_pass_on, self.sums
        return any(of.get(peer) for of in missing)

    def start(self) -> OutgoingFrames:
        """Begins this reduction's error feedback, before all else in the compute thread."""
        if self.feedback is None:
            return []
        if len(self.nodes) == 1:
            self.feedback.begin_alone(self.ballot)
            return []
        self.owed = self.feedback.row
        self.owing = self.feedback.begin(self.ballot, self.gradient)
        return []

    def contribute(self, number: int) -> OutgoingFrames:
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
            frame, _ = self._coded("contribution", number, piece, self._own_values(piece).clone())
            if number == 0:
                frame.fields["ids"] = self.shares[self.node]
            outgoing.append((owner, frame))
        return outgoing

    def absorb(self, peer: str, frame: Frame) -> OutgoingFrames:
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
        piece = (self.pieces_of[peer] if phase == "sum" else self.own)[number]
        if self.evidence is not None:
            signer = self._maker(peer, piece) if phase == "sum" else peer
            self.evidence.receive(peer, signer, str(phase), piece, frame)
        if phase == "sum":
            return self._copy_sum(peer, piece, frame)
        if phase == "row sum":
            self.totals["row sum", number].early[peer] = frame
            return self._add_rows(number)
        if number == 0:
            self._note_ids(peer, frame.fields.get("ids"))
        self.totals["contribution", number].early[peer] = frame
        return self._add_contributions(number)

    # --- sums

    def _add_contributions(self, number: int) -> OutgoingFrames:
        """Adds the row's contributions to a piece; a complete sum goes to the owner that adds all
        rows."""
        total = self._add_up("contribution", number, self.row)
        if total is None:
            return []
        piece = self.own[number]
        if len(self.rows) == 1:
            return self._send_sum(number, total)
        if piece.home == self.home:
            self.totals["row sum", number].early[self.node] = total
            return self._add_rows(number)
        owner = self.column[piece.home]
        frame, _ = self._coded("row sum", self.pieces_of[owner].index(piece), piece, total)
        return [(owner, frame)]

    def _add_rows(self, number: int) -> OutgoingFrames:
        total = self._add_up("row sum", number, self.column)
        return [] if total is None else self._send_sum(number, total)

    def _add_up(
        self, phase: Literal["contribution", "row sum"], number: int, nodes: Sequence[str]
    ) -> Tensor | None:
        """Adds the available terms to a piece's total in node order; returns a complete total."""
        total = self.totals[phase, number]
        for node in nodes[total.added :]:
            if node == self.node and phase == "contribution":
                values = self._own_values(self.own[number])
                if self.evidence is not None:
                    self.evidence.keep_contribution(self.own[number], values)
            elif (term := total.early.pop(node, None)) is None:
                return None
            elif isinstance(term, Frame):
                values = self._values(node, term, self.own[number])
            else:
                values = term
            total.value = values.clone() if total.value is None else total.value.add_(values)
            total.added += 1
        return self.totals.pop((phase, number)).value

    def _send_sum(self, number: int, total: Tensor) -> OutgoingFrames:
        """Sends the complete sum of a piece of the gradient to the other replicas."""
        piece = self.own[number]
        frame, sent = self._coded("sum", number, piece, total)
        piece.of(self.gradient).copy_(sent)  # with a lossy codec: what the others will have
        if piece.names:
            frame.fields["ids"] = {node: self.shares[node] for node in self.row}
        return [(node, frame) for node in self._others((*self.row, *self.column))]

    def _copy_sum(self, peer: str, piece: GradientPiece, frame: Frame) -> OutgoingFrames:
        """Copies a sum into the gradient; another owner's is passed on to the row unchanged."""
        piece.of(self.gradient).copy_(self._values(peer, frame, piece))
        fields: dict[str, Any] = {"phase": "sum", "last": self.round.last}
        if self.evidence is not None:
            fields["signed"] = frame.fields["signed"]
        if piece.names:
            fields["ids"] = ids = frame.fields.get("ids")
            self._note_row(peer, self.rows[piece.home], ids)
        if peer in self.sums:
            return []
        fields["piece"] = self.own.index(piece)
        coded = frame.descriptors, buffers_of(frame.payload)
        passed_on = Frame("average", self.ballot, fields, *coded)
        return [(node, passed_on) for node in self.sums]

    def _maker(self, peer: str, piece: GradientPiece) -> str:
        """The replica that has made the sum that `peer` sends."""
        return self.rows[piece.home][row_of(peer, self.rows).index(peer)]

    def _own_values(self, piece: GradientPiece) -> Tensor:
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

    # --- coding

    def _coded(
        self, phase: Phase, number: int, piece: GradientPiece, values: Tensor
    ) -> tuple[Frame, Tensor]:
        """Encodes values; returns what receivers will have, too. The rest is for error feedback."""
        fields: dict[str, Any] = {"phase": phase, "piece": number, "last": self.round.last}
        coded = self.coding.encode(values, piece.start)
        if self.evidence is not None:
            fields["signed"] = self.evidence.sign(phase, piece, coded[1])
        frame = Frame("average", self.ballot, fields, *coded)
        if self.coding.codec == "none" or not (self.owing is not None or phase == "sum"):
            return frame, values
        sent = self.coding.decode(frame, values, piece.start)
        if self.owing is not None:
            piece.of(self.owing).copy_(values).sub_(sent)
        return frame, sent

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
