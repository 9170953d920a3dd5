"""One stage at work: microbatches come in as frames, are computed, and leave as frames.

A microbatch visits its route forward (embed, blocks, head and loss) and then the same nodes
backward. A node keeps what backward will need.

Where a stage has replicas, its neighbours also keep what they have sent it, until the step is
committed. When one of the replicas is lost, the attempt goes on by a new plan (docs/masking.md):
what the lost one was sent is sent again to those that do its microbatches in its place. They redo
what it had done, and only that; a neighbour that has their results already drops them. With
`masking = "spare"` a node's stand-in gets what the node gets from the start, and does it ahead when
it has nothing else to do: what it makes is withheld until the node is lost.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import torch

from planaria.node.data.corpus import Corpus
from planaria.node.data.windows import Windows, microbatch_ids, samples_hash
from planaria.node.ports import Priority
from planaria.node.run_file import RunFile
from planaria.node.stage.compute import ComputeThread, T
from planaria.node.stage.model import BodyStage, EmbeddingStage
from planaria.node.stage.optimizer import StageOptimizer
from planaria.node.stage.shape import ModelConfig
from planaria.node.state.boundary import BoundaryKeeper, Side
from planaria.node.state.twin import Twin
from planaria.node.transaction.averaging import AveragingError
from planaria.node.transaction.effects import NEVER, Ballot
from planaria.node.transaction.routing import Route, routes, stand_ins
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.frames import Frame, WireError
from planaria.node.wire.tensors import decode, encode

MEASURED: Final = 9
"""Microbatches whose median duration is a node's seconds per microbatch."""
FORGIVEN: Final = 0.8
"""Factor on a node's seconds per microbatch for each step in which it had none, so that who was
slow once is tried again."""


class Work(NamedTuple):
    """What a visit makes of an activation, or of a gradient."""

    microbatch: int
    position: int
    kind: str


@dataclass(frozen=True)
class Visit:
    """Where a microbatch is on its route."""

    microbatch: int
    position: int
    route: Route

    def after(self, kind: str) -> Visit:
        """The next one of an activation, or of a gradient."""
        by = 1 if kind == "activation" else -1
        return replace(self, position=self.position + by)

    @property
    def node(self) -> str:
        return self.route.nodes[self.position]

    @property
    def stage(self) -> int:
        return self.route.stages[self.position]

    @property
    def at_head(self) -> bool:
        return self.position == len(self.route.nodes) - 1

    def before(self, kind: str) -> Work | None:
        """The work at this node that is to be done before this; None: there is none."""
        if kind == "gradient":
            position = self.position or len(self.route.nodes) - 1
        elif self.at_head:
            position = 0
        else:
            return None
        return Work(self.microbatch, position, "activation")


class PipelineEvents(Protocol):
    """What the daemon does for its pipeline; all called on the event loop."""

    def send_frame(self, peer: str, frame: Frame) -> bool: ...
    def microbatch_home(self, ballot: Ballot, home: pb.Home) -> None: ...
    def cut_off(self, ballot: Ballot, node: str, reason: str) -> None: ...
    def attempt_failed(self, ballot: Ballot, reason: str, accused: Sequence[str]) -> None: ...
    def crashed(self, error: BaseException) -> None: ...


class Pipeline:
    """The microbatches of one attempt at one node. Methods are called on the event loop."""

    def __init__(
        self,
        node: str,
        stage: int,
        module: EmbeddingStage | BodyStage,
        optimizer: StageOptimizer,
        run: RunFile,
        config: ModelConfig,
        corpus: Corpus | None,
        device: torch.device,
        compute: ComputeThread,
        events: PipelineEvents,
        twin: Twin | None = None,
        boundary: BoundaryKeeper | None = None,
    ) -> None:
        self.node, self.stage = node, stage
        self.module, self.optimizer = module, optimizer
        self.run, self.config, self.device = run, config, device
        self.corpus = corpus
        self.compute, self.events = compute, events
        self.twin = twin
        self.boundary = boundary
        self.in_flight = run.training.in_flight or config.stages + 1
        self.began = self.ballot = NEVER  # what the attempt began under, and goes on under
        self.begin = pb.Begin()
        self.routes: dict[int, Route] = {}
        # The compute thread's copies: older tasks that still wait there are skipped.
        self.live, self.live_begin = NEVER, pb.Begin()
        self.applied: set[int] = set()  # ids whose gradient is in the optimizer's
        self.computed = 0  # microbatches, forward and backward
        self._seconds: deque[float] = deque(maxlen=MEASURED)  # of the last of them
        self._waiting: deque[int] = deque()  # to be injected here
        self._out: set[int] = set()  # injected, and not home
        self._mine = 0  # microbatches whose routes visit this node
        self._complete = asyncio.Event()  # all of them are in the gradient
        self._own_gradient: torch.Tensor | None = None  # before it was reduced
        self._most_kept = 0
        self._maskable: frozenset[str] = frozenset()  # whose loss leaves their stage alive
        self._seen: set[Work] = set()
        self._done: set[Work] = set()
        self._early: dict[Work, list[tuple[str, Frame]]] = {}  # frames, by what comes before them
        self._sent: dict[Work, Frame] = {}  # to maskable nodes
        self._stand_ins: dict[str, str] = {}  # by node
        self._done_ahead: set[int] = set()  # microbatches that were others' when they were done
        self._withheld: dict[Work, Frame] = {}  # made in another's place
        self._homes_made: dict[int, pb.Home] = {}  # and not sent
        # The compute thread's: gradients made in another node's place, and whose are the own now.
        self._ahead: dict[str, torch.Tensor] = {}
        self._inherited: set[str] = set()
        self._saved: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._homes: dict[int, pb.Home] = {}
        self._spent: defaultdict[int, float] = defaultdict(float)  # seconds, for a microbatch here
        if isinstance(module, EmbeddingStage):
            self._embed, self._loss = module.embed, module.loss
        else:
            self._blocks: Callable[[torch.Tensor], torch.Tensor] = module
        if run.training.compile:
            self._compile()
        if corpus is not None:
            samples = corpus.count("train", config.context)
            self.windows = Windows(run.seed, samples, run.training.batch)

    def _compile(self) -> None:
        if self.stage == 0:
            self._embed, self._loss = torch.compile(self._embed), torch.compile(self._loss)
        else:
            self._blocks = torch.compile(self._blocks)

    # --- attempts

    @property
    def seconds_per_microbatch(self) -> float:
        """Of computing, here; 0: there was none yet."""
        return statistics.median(self._seconds) if self._seconds else 0.0

    def start(self, ballot: Ballot, begin: pb.Begin) -> None:
        """Raises ValueError for a plan that can't be."""
        self._reset(ballot, begin)
        if not self._mine:
            self._seconds = deque((FORGIVEN * s for s in self._seconds), maxlen=MEASURED)
        self._waiting.extend(m.id for m in begin.plan if m.source == self.node)
        self._inject()

    def go_on(self, ballot: Ballot, begin: pb.Begin) -> None:
        """By a new plan, in which others have the microbatches of who was lost. Raises
        ValueError."""
        before = self.routes
        lost = {place.node for place in self.begin.members}
        lost -= {place.node for place in begin.members}
        left = {node for node in lost if self._stand_ins.get(node) == self.node}
        self._follow(ballot, begin)
        for microbatch, route in before.items():
            if left & set(route.nodes) and self.node not in self.routes[microbatch].nodes:
                raise ValueError(f"microbatch {microbatch} is not given to the lost one's stand-in")
        self._then(self.compute.run(partial(self._inherit, left)), lambda _: None)
        for work, frame in list(self._sent.items()):
            node = self.routes[work.microbatch].nodes[work.position]
            if node != before[work.microbatch].nodes[work.position]:
                self._send(node, work, frame)
        self._release()
        self._waiting.extend(
            m.id
            for m in begin.plan
            if m.source == self.node != before[m.id].nodes[0] and m.id not in self.applied
        )
        self._inject()

    def _release(self) -> None:
        """What was done in the place of nodes that are lost now is this node's own."""
        self.applied |= {m for m in self._done_ahead if self.node in self.routes[m].nodes}
        self._note_if_complete()
        for work, frame in list(self._withheld.items()):
            del self._withheld[work]
            self._send_or_withhold(work, frame)
        self._send_homes()

    @property
    def most_kept(self) -> int:
        """Bytes, at the end of an attempt, of what might have had to be sent or averaged again."""
        frames = (*self._sent.values(), *self._withheld.values())
        gradients = [*self._ahead.values()]
        gradients += [] if self._own_gradient is None else [self._own_gradient]
        kept = sum(frame.size for frame in frames) + sum(flat.nbytes for flat in gradients)
        return max(self._most_kept, kept)

    def drop(self, ballot: Ballot) -> None:
        """The attempt leaves no trace."""
        if ballot == self.ballot:
            self._reset(NEVER, pb.Begin())

    def _reset(self, ballot: Ballot, begin: pb.Begin) -> None:
        self._most_kept = self.most_kept
        self.began = ballot
        self.applied = set()
        self._seen, self._done, self._out = set(), set(), set()
        self._done_ahead, self._withheld, self._homes_made = set(), {}, {}
        self._waiting, self._early, self._sent = deque(), {}, {}
        self._follow(ballot, begin)

        def reset() -> None:
            self.live, self.live_begin = ballot, begin
            self._saved.clear()
            self._homes.clear()
            self._spent.clear()
            self._own_gradient = None
            self._ahead.clear()
            self._inherited.clear()
            self.optimizer.zero_gradient()

        self._then(self.compute.run(reset), lambda _: None)

    def _follow(self, ballot: Ballot, begin: pb.Begin) -> None:
        """This plan from now on."""
        self.routes = routes(begin)
        self.ballot, self.begin = ballot, begin
        self._mine = sum(self.node in route.nodes for route in self.routes.values())
        self._maskable = frozenset()
        if self.run.recovery.masking != "abort" and begin.kind == pb.Begin.TRAIN:
            replicas = Counter(place.stage for place in begin.members)
            self._maskable = frozenset(p.node for p in begin.members if replicas[p.stage] > 1)
        spare = self.run.recovery.masking == "spare" and begin.kind == pb.Begin.TRAIN
        self._stand_ins = stand_ins(begin.members) if spare else {}
        self._note_if_complete()

    def _note_if_complete(self) -> None:
        if len(self.applied) < self._mine:
            self._complete.clear()
        else:
            self._complete.set()

    async def complete(self, deadline: float) -> None:
        """The gradient is of all of this node's microbatches; those that it does in place of a lost
        node may come home long before. It may be reduced in vain, so a copy is kept while another
        loss may do that. Raises AveragingError after `deadline` seconds."""
        try:
            async with asyncio.timeout(deadline):
                await self._complete.wait()
        except TimeoutError:
            missing = sorted(
                microbatch
                for microbatch, route in self.routes.items()
                if self.node in route.nodes and microbatch not in self.applied
            )
            raise AveragingError(
                f"after {deadline:g} s microbatches {missing} are not computed"
            ) from None
        if self.node in self._maskable:
            await self.compute.run(self._keep_gradient)

    def _keep_gradient(self) -> None:
        self._own_gradient = self.optimizer.gradient.clone()

    def _inherit(self, lost: set[str]) -> None:
        """In the compute thread: the gradient is of this node's own microbatches again, and what
        was done ahead in the place of lost nodes belongs to it."""
        if self._own_gradient is not None:
            self.optimizer.gradient.copy_(self._own_gradient)
            self._own_gradient = None
        for node in lost & self._ahead.keys():
            self.optimizer.gradient.add_(self._ahead.pop(node))
        self._inherited |= lost

    # --- the source

    def _inject(self) -> None:
        while self._waiting and len(self._out) < self.in_flight:
            microbatch = self._waiting.popleft()
            self._out.add(microbatch)
            self._embed_soon(microbatch, Priority.FORWARD)

    def _embed_soon(self, microbatch: int, priority: Priority) -> None:
        work = Work(microbatch, 0, "activation")
        if work not in self._seen:  # else it was done ahead
            self._seen.add(work)
            visit = Visit(microbatch, 0, self.routes[microbatch])
            self._post(priority, work, partial(self._embed_forward, visit))

    def _samples(self, microbatch: int) -> tuple[np.ndarray[Any, Any], torch.Tensor]:
        assert self.corpus is not None
        size = self.run.training.microbatch
        if self._evaluating:
            split = "validation"
            count = self.corpus.count(split, self.config.context)
            ids = (np.arange(microbatch * size, (microbatch + 1) * size)) % count
        else:
            split = "train"
            ids = microbatch_ids(self.windows.ids(self.live_begin.step), microbatch, size)
        tokens = self.corpus.samples(split, self.config.context, ids)
        return ids, torch.from_numpy(tokens).to(self.device)

    def _embed_forward(self, visit: Visit) -> Callable[[], None]:
        started = time.perf_counter()
        ids, tokens = self._samples(visit.microbatch)
        self._homes[visit.microbatch] = pb.Home(
            microbatch=visit.microbatch, samples=len(ids), samples_hash=samples_hash(ids)
        )
        with self._mode():
            x = self._embed(tokens[:, :-1])
        self._save(visit, tokens, x)
        return self._onward("activation", visit, x, started)

    def _head(self, visit: Visit, x: torch.Tensor) -> Callable[[], None]:
        started = time.perf_counter()
        tokens, _ = self._saved[visit.microbatch, 0]
        targets = tokens[:, 1:]
        with self._mode():
            loss = self._loss(x.requires_grad_(not self._evaluating), targets)
        home = self._homes[visit.microbatch]
        home.loss, home.tokens = loss.item(), targets.numel()
        if self._evaluating:
            del self._saved[visit.microbatch, 0]
            return partial(self._came_home, visit.microbatch, 0.0)
        # Each token weighs the same in the window, whoever computes it: gradients simply add up.
        window = self.run.training.batch * self.config.context
        with self._into_gradient_of(visit):
            (loss / window).backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None
        return self._onward("gradient", visit, x.grad, started)

    def _embed_backward(self, visit: Visit, gradient: torch.Tensor) -> Callable[[], None]:
        started = time.perf_counter()
        _, x = self._saved.pop((visit.microbatch, 0))
        with self._into_gradient_of(visit):
            x.backward(gradient)  # type: ignore[no-untyped-call]
        self._spend(visit, started)
        return partial(self._came_home, visit.microbatch, self._spent.pop(visit.microbatch))

    def _came_home(self, microbatch: int, seconds: float) -> None:
        if self.begin.kind == pb.Begin.TRAIN:
            self._count(microbatch, seconds)
        self._out.discard(microbatch)
        self._homes_made[microbatch] = self._homes.pop(microbatch)
        self._send_homes()
        self._inject()

    def _send_homes(self) -> None:
        """Those that are this node's to send."""
        for microbatch in [m for m in self._homes_made if self.routes[m].nodes[0] == self.node]:
            self.events.microbatch_home(self.ballot, self._homes_made.pop(microbatch))

    # --- frames

    def take(self, peer: str, frame: Frame) -> None:
        """A frame of the running attempt has come from `peer`."""
        try:
            visit = self._visit(frame)
        except WireError as error:
            self.events.attempt_failed(self.ballot, f"{peer} sent a bad frame: {error}", [peer])
            return
        if not self._is_expected(peer, frame, visit):
            return
        work = Work(visit.microbatch, visit.position, frame.kind)
        if work in self._seen:
            return
        before = visit.before(frame.kind)
        ahead = visit.node != self.node
        if before is not None and before not in self._done:  # it is redone, or done ahead, here
            self._early.setdefault(before, []).append((peer, frame))
            if ahead and before.position == 0:
                self._embed_soon(visit.microbatch, Priority.BACKGROUND)
            return
        self._seen.add(work)
        forward = frame.kind == "activation"
        priority = Priority.FORWARD if forward and not visit.at_head else Priority.BACKWARD
        priority = Priority.BACKGROUND if ahead else priority
        compute = self._forward if forward else self._backward
        self._post(priority, work, partial(self._compute, peer, frame, visit, compute))

    def _visit(self, frame: Frame) -> Visit:
        """Raises WireError."""
        try:
            microbatch, position = int(frame.fields["microbatch"]), int(frame.fields["position"])
        except (KeyError, TypeError, ValueError) as error:
            raise WireError(f"a frame of the pipeline lacks or garbles {error}") from error
        route = self.routes.get(microbatch)
        if route is None:
            raise WireError(f"there is no microbatch {microbatch} in this attempt")
        first, last = (1, 0) if frame.kind == "activation" else (0, 1)
        if not first <= position < len(route.nodes) - last:
            raise WireError(
                f"{frame.kind} at position {position} of a route of {len(route.nodes)} visits"
            )
        return Visit(microbatch, position, route)

    def _is_expected(self, peer: str, frame: Frame, visit: Visit) -> bool:
        """Who follows an older plan, from before a loss, may send what is another's by now."""
        sender = replace(visit, position=2 * visit.position - visit.after(frame.kind).position)
        here = self.node in (visit.node, self._stand_ins.get(visit.node))
        if here and sender.node == peer:
            return True
        if frame.ballot == self.ballot:
            reason = (
                f"{peer} sent the {frame.kind} of microbatch {visit.microbatch} for stage "
                f"{visit.stage}, which by the plan goes from {sender.node} to {visit.node}"
            )
            self.events.attempt_failed(self.ballot, reason, [peer])
        return False

    def _compute(
        self,
        peer: str,
        frame: Frame,
        visit: Visit,
        compute: Callable[[Visit, torch.Tensor], Callable[[], None]],
    ) -> Callable[[], None]:
        try:
            (tensor,) = decode(frame.descriptors, frame.payload, self.device)
        except (WireError, ValueError) as error:
            reason = f"{frame.kind} of microbatch {visit.microbatch} from {peer}: {error}"
            return partial(self.events.attempt_failed, self.live, reason, [peer])
        if frame.kind == "activation":
            self._keep("received", visit, frame)
        return compute(visit, tensor)

    def _keep(self, side: Side, visit: Visit, frame: Frame) -> None:
        if self.boundary is not None and self.node in visit.route.nodes:
            self.boundary.keep(side, frame, self.live, visit.route.stages)

    def _forward(self, visit: Visit, x: torch.Tensor) -> Callable[[], None]:
        if visit.at_head:
            return self._head(visit, x)
        started = time.perf_counter()
        with self._mode():
            y = self._blocks(x.requires_grad_(not self._evaluating))
        self._save(visit, x, y)
        return self._onward("activation", visit, y, started)

    def _backward(self, visit: Visit, gradient: torch.Tensor) -> Callable[[], None]:
        if visit.position == 0:
            return self._embed_backward(visit, gradient)
        started = time.perf_counter()
        x, y = self._saved.pop((visit.microbatch, visit.position))
        with self._into_gradient_of(visit):
            y.backward(gradient)  # type: ignore[no-untyped-call]
        assert x.grad is not None
        onward = self._onward("gradient", visit, x.grad, started)
        seconds = self._spent.pop(visit.microbatch)

        def done() -> None:
            self._count(visit.microbatch, seconds)
            onward()

        return done

    def _onward(
        self, kind: str, visit: Visit, tensor: torch.Tensor, started: float
    ) -> Callable[[], None]:
        """Make the frame here, in the compute thread; what is returned sends it from the loop."""
        wire = self.run.wire
        codec = wire.activations if kind == "activation" else wire.gradients
        descriptors, buffers = encode([tensor.detach()], codec)
        onward = visit.after(kind)
        fields = {"microbatch": onward.microbatch, "position": onward.position}
        frame = Frame(kind, self.live, fields, descriptors, tuple(buffers))
        self._spend(visit, started)
        if kind == "activation":
            self._keep("sent", onward, frame)

        def send() -> None:
            self._send_or_withhold(Work(onward.microbatch, onward.position, kind), frame)
            if kind == "activation" and self.twin is not None:
                self._post(Priority.BACKGROUND, None, partial(self._forward_twin, self.twin, frame))

        return send

    def _send_or_withhold(self, work: Work, frame: Frame) -> None:
        """By the plan as it is now: it may be another one than when this was computed."""
        nodes = self.routes[work.microbatch].nodes
        made_at = work.position - (1 if work.kind == "activation" else -1)
        if nodes[made_at] == self.node:
            self._send(nodes[work.position], work, frame)
        else:
            self._withheld[work] = frame

    def _send(self, node: str, work: Work, frame: Frame) -> None:
        frame = replace(frame, ballot=self.ballot)
        if node in self._maskable:
            self._sent[work] = frame
        for to in filter(None, (node, self._stand_ins.get(node))):
            if not self.events.send_frame(to, frame):
                reason = f"no link to {to} for microbatch {work.microbatch}"
                self.events.cut_off(self.ballot, to, reason)

    def _forward_twin(self, twin: Twin, frame: Frame) -> None:
        """Compute redundantly what the next stage makes of this very frame."""
        if self._evaluating or twin.state.id.step != self.live_begin.step - 1:
            return
        (x,) = decode(frame.descriptors, frame.payload, self.device)
        with self._mode():
            twin.forward(x)

    # --- small things

    @property
    def _evaluating(self) -> bool:
        return self.live_begin.kind == pb.Begin.EVALUATE

    def _spend(self, visit: Visit, since: float) -> None:
        """In the compute thread."""
        self._spent[visit.microbatch] += time.perf_counter() - since

    def _mode(self) -> Any:
        if self._evaluating:
            return torch.no_grad()
        bf16 = self.run.training.precision == "bf16"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=bf16)

    def _save(self, visit: Visit, x: torch.Tensor, y: torch.Tensor) -> None:
        if not self._evaluating or visit.position == 0:
            self._saved[visit.microbatch, visit.position] = (x, y)

    @contextmanager
    def _into_gradient_of(self, visit: Visit) -> Iterator[None]:
        """In the compute thread: what is done in another's place has a gradient of its own, until
        it is inherited."""
        owner = visit.node
        if owner == self.node or owner in self._inherited:
            yield
            return
        if owner not in self._ahead:
            self._ahead[owner] = torch.zeros_like(self.optimizer.gradient)
        with self.optimizer.accumulating_into(self._ahead[owner]):
            yield

    def _count(self, microbatch: int, seconds: float) -> None:
        own = self.node in self.routes[microbatch].nodes
        (self.applied if own else self._done_ahead).add(microbatch)
        self.computed += 1
        self._note_if_complete()
        self._seconds.append(seconds)

    def _post(
        self, priority: Priority, work: Work | None, task: Callable[[], Callable[[], None] | None]
    ) -> None:
        """Compute in the thread; then do on the loop what the task returns, if still wanted."""
        ballot = self.began

        def compute() -> Callable[[], None] | None:
            return task() if ballot == self.live else None

        def then(done: Callable[[], None] | None) -> None:
            if done is None or ballot != self.began:
                return
            done()
            if work is not None:
                self._done.add(work)
                for peer, frame in self._early.pop(work, []):
                    self.take(peer, frame)

        self._then(self.compute.run(compute, priority), then)

    def _then(self, future: Any, then: Callable[[T], None]) -> None:
        def finished(future: Any) -> None:
            if future.cancelled():
                return
            error = future.exception()
            if error is not None:
                self.events.crashed(error)
            else:
                then(future.result())

        future.add_done_callback(finished)
