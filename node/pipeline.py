"""One stage at work: microbatches come in as frames, are computed, and leave as frames.

A microbatch visits its route forward (embed, blocks, head and loss) and then the same nodes
backward. Everything it needs travels with it, so a node keeps only what backward will need.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from node import stage_pb2 as pb
from node.boundary import BoundaryKeeper
from node.compute import ComputeThread, Priority, T
from node.corpus import Corpus
from node.effects import NEVER, Ballot
from node.model import BodyStage, EmbeddingStage, ModelConfig
from node.optimizer import StageOptimizer
from node.routing import Route, Routing
from node.run_file import RunFile
from node.twin import Twin
from node.windows import Windows, microbatch_ids, samples_hash
from node.wire import Frame, WireError, decode, encode


@dataclass(frozen=True)
class Visit:
    """Where a microbatch is on its route, and the seconds computed for it so far, by position."""

    microbatch: int
    position: int
    route: Route
    seconds: tuple[float, ...]

    @staticmethod
    def parse(fields: dict[str, Any]) -> Visit:
        """Raises WireError."""
        try:
            nodes, stages = tuple(map(str, fields["nodes"])), tuple(map(int, fields["stages"]))
            seconds = tuple(map(float, fields["seconds"]))
            visit = Visit(
                int(fields["microbatch"]), int(fields["position"]), Route(nodes, stages), seconds
            )
        except (KeyError, TypeError, ValueError) as error:
            raise WireError(f"a frame of the pipeline lacks or garbles {error}") from error
        if not (len(nodes) == len(stages) == len(seconds) and 0 <= visit.position < len(nodes)):
            raise WireError(f"position {visit.position} is not on a route of {len(nodes)} visits")
        return visit

    def fields(self) -> dict[str, Any]:
        return {
            "microbatch": self.microbatch,
            "position": self.position,
            "nodes": list(self.route.nodes),
            "stages": list(self.route.stages),
            "seconds": list(self.seconds),
        }

    def after(self, seconds: float, forward: bool) -> Visit:
        """The next visit, with `seconds` of compute added to this one."""
        spent = list(self.seconds)
        spent[self.position] += seconds
        position = self.position + (1 if forward else -1)
        return Visit(self.microbatch, position, self.route, tuple(spent))

    @property
    def node(self) -> str:
        return self.route.nodes[self.position]

    @property
    def at_head(self) -> bool:
        return self.position == len(self.route.nodes) - 1


class PipelineEvents(Protocol):
    """What the daemon does for its pipeline; all called on the event loop."""

    def send_frame(self, peer: str, frame: Frame) -> bool: ...
    def microbatch_home(self, ballot: Ballot, home: pb.Home) -> None: ...
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
        self.routing = Routing(node, run.training.in_flight or config.stages + 1)
        self.ballot = NEVER
        self.begin = pb.Begin()
        # The compute thread's copies: older tasks that still wait there are skipped.
        self.live, self.live_begin = NEVER, pb.Begin()
        self.applied: set[int] = set()  # ids whose gradient is in the optimizer's
        self.computed = 0  # microbatches, forward and backward
        self.seconds_per_microbatch = 0.0
        self._seen: set[tuple[int, int, str]] = set()
        self._saved: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._homes: dict[int, pb.Home] = {}
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

    def start(self, ballot: Ballot, begin: pb.Begin) -> None:
        self._reset(ballot, begin)
        if self.corpus is None:
            return
        replicas: dict[int, list[str]] = {}
        for place in begin.members:
            replicas.setdefault(place.stage, []).append(place.node)
        own = [(m.id, tuple(m.order)) for m in begin.plan if m.source == self.node]
        self.routing.begin(replicas, own)
        self._inject()

    def drop(self, ballot: Ballot) -> None:
        """The attempt leaves no trace."""
        if ballot == self.ballot:
            self._reset(NEVER, pb.Begin())

    def _reset(self, ballot: Ballot, begin: pb.Begin) -> None:
        self.ballot, self.begin = ballot, begin
        self.applied = set()
        self._seen = set()

        def reset() -> None:
            self.live, self.live_begin = ballot, begin
            self._saved.clear()
            self._homes.clear()
            self.optimizer.zero_gradient()

        self._then(self.compute.run(reset), lambda _: None)

    # --- the source

    def _inject(self) -> None:
        while (injected := self.routing.inject()) is not None:
            identity, route = injected
            visit = Visit(identity, 0, route, (0.0,) * len(route.nodes))
            self._post(Priority.FORWARD, partial(self._embed_forward, visit))

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
            return partial(self._came_home, visit)
        # Each token weighs the same in the window, whoever computes it: gradients simply add up.
        window = self.run.training.batch * self.config.context
        (loss / window).backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None
        return self._onward("gradient", visit, x.grad, started)

    def _embed_backward(self, visit: Visit, gradient: torch.Tensor) -> Callable[[], None]:
        started = time.perf_counter()
        _, x = self._saved.pop((visit.microbatch, 0))
        x.backward(gradient)  # type: ignore[no-untyped-call]
        spent = visit.after(time.perf_counter() - started, forward=True)
        return partial(self._came_home, spent)

    def _came_home(self, visit: Visit) -> None:
        if self.begin.kind == pb.Begin.TRAIN:
            self._count(visit.microbatch)
            own = visit.seconds[0] + visit.seconds[-1]
            self._measure(own)
        spent = dict(zip(visit.route.nodes[1:-1], visit.seconds[1:-1], strict=True))
        self.routing.home(visit.microbatch, spent)
        self.events.microbatch_home(self.ballot, self._homes.pop(visit.microbatch))
        self._inject()

    # --- frames

    def take(self, peer: str, frame: Frame) -> None:
        """A frame of the running attempt has come from `peer`."""
        try:
            visit = Visit.parse(frame.fields)
            self._expect(peer, frame.kind, visit)
        except WireError as error:
            self.events.attempt_failed(self.ballot, f"{peer} sent a bad frame: {error}", [peer])
            return
        key = (visit.microbatch, visit.position, frame.kind)
        if key in self._seen:
            return
        self._seen.add(key)
        forward = frame.kind == "activation"
        priority = Priority.FORWARD if forward and not visit.at_head else Priority.BACKWARD
        work = self._forward if forward else self._backward
        self._post(priority, partial(self._compute, peer, frame, visit, work))

    def _expect(self, peer: str, kind: str, visit: Visit) -> None:
        route = visit.route
        came_from = visit.position - 1 if kind == "activation" else visit.position + 1
        if not 0 <= came_from < len(route.nodes) or route.nodes[came_from] != peer:
            raise WireError(f"{kind} of microbatch {visit.microbatch} came from off its route")
        if visit.node != self.node or route.stages[visit.position] != self.stage:
            raise WireError(
                f"{kind} of microbatch {visit.microbatch} is for node {visit.node} at stage "
                f"{route.stages[visit.position]}, not for {self.node} at stage {self.stage}"
            )

    def _compute(
        self,
        peer: str,
        frame: Frame,
        visit: Visit,
        work: Callable[[Visit, torch.Tensor], Callable[[], None]],
    ) -> Callable[[], None]:
        try:
            (tensor,) = decode(frame.descriptors, frame.payload, self.device)
        except (WireError, ValueError) as error:
            reason = f"{frame.kind} of microbatch {visit.microbatch} from {peer}: {error}"
            return partial(self.events.attempt_failed, self.live, reason, [peer])
        if self.boundary is not None and frame.kind == "activation":
            self.boundary.keep("received", frame)
        return work(visit, tensor)

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
        y.backward(gradient)  # type: ignore[no-untyped-call]
        assert x.grad is not None
        onward = self._onward("gradient", visit, x.grad, started)

        def done() -> None:
            self._count(visit.microbatch)
            self._measure(visit.seconds[visit.position] + time.perf_counter() - started)
            onward()

        return done

    def _onward(
        self, kind: str, visit: Visit, tensor: torch.Tensor, started: float
    ) -> Callable[[], None]:
        """Make the frame here, in the compute thread; what is returned sends it from the loop."""
        wire = self.run.wire
        codec = wire.activations if kind == "activation" else wire.gradients
        descriptors, buffers = encode([tensor.detach()], codec)
        onward = visit.after(time.perf_counter() - started, forward=kind == "activation")
        ballot = self.live
        frame = Frame(kind, ballot, onward.fields(), descriptors, tuple(buffers))
        if self.boundary is not None and kind == "activation":
            self.boundary.keep("sent", frame)

        def send() -> None:
            if not self.events.send_frame(onward.node, frame):
                reason = f"no link to {onward.node} for microbatch {visit.microbatch}"
                self.events.attempt_failed(ballot, reason, [onward.node])
            if kind == "activation" and self.twin is not None:
                self._post(Priority.BACKGROUND, partial(self._forward_twin, self.twin, frame))

        return send

    def _forward_twin(self, twin: Twin, frame: Frame) -> None:
        """Compute redundantly what the next stage makes of this very frame."""
        if self._evaluating or twin.step != self.live_begin.step - 1:
            return
        (x,) = decode(frame.descriptors, frame.payload, self.device)
        with self._mode():
            twin.forward(x)

    # --- small things

    @property
    def _evaluating(self) -> bool:
        return self.live_begin.kind == pb.Begin.EVALUATE

    def _mode(self) -> Any:
        if self._evaluating:
            return torch.no_grad()
        bf16 = self.run.training.precision == "bf16"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=bf16)

    def _save(self, visit: Visit, x: torch.Tensor, y: torch.Tensor) -> None:
        if not self._evaluating or visit.position == 0:
            self._saved[visit.microbatch, visit.position] = (x, y)

    def _count(self, microbatch: int) -> None:
        self.applied.add(microbatch)
        self.computed += 1

    def _measure(self, seconds: float) -> None:
        before = self.seconds_per_microbatch or seconds
        self.seconds_per_microbatch = before + 0.3 * (seconds - before)

    def _post(self, priority: Priority, task: Callable[[], Callable[[], None] | None]) -> None:
        """Compute in the thread; then do on the loop what the task returns, if still wanted."""
        ballot = self.ballot

        def work() -> Callable[[], None] | None:
            return task() if ballot == self.live else None

        def then(done: Callable[[], None] | None) -> None:
            if done is not None and ballot == self.ballot:
                done()

        self._then(self.compute.run(work, priority), then)

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
