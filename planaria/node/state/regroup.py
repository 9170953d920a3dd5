"""Converts a run's saves for a run that has the same model in more or fewer stages.

All body stages have the same number of layers. A stage's flat tensors contain its layers in order.
So a new stage's tensors are pieces of the old ones', concatenated, and copied from file to file in
chunks. The new saves belong to another run, whose nodes accept no others, and to another lineage
than the old ones.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from planaria.node.model.shape import BETAS, ModelConfig
from planaria.node.state.saves import Bytes, SaveFile, Saves, Values
from planaria.node.state.stage_state import SaveError, StageState, StateId
from planaria.node.transaction.scales import has_for, of_stage
from planaria.node.wire import stage_pb2 as pb
from planaria.recovery.decide import Held, Resume, Source, resume

log = logging.getLogger(__name__)

MOMENTS = ("first_moment", "second_moment")


class RegroupError(Exception):
    """These saves can't be regrouped; the message says why and what to do."""


class LayerRange(NamedTuple):
    """Consecutive layers of an old stage."""

    stage: int
    first: int  # index within the stage, from 0
    layers: int
    of: int  # layers of the whole stage


def pieces(stage: int, layers: int, before: int, after: int) -> list[LayerRange]:
    """The pieces of a stage of `after` body stages, in order, of `layers` layers in all that were
    divided into `before`. Stage 0 isn't divided: it counts as one layer, and stays."""
    if stage == 0:
        return [LayerRange(0, 0, 1, 1)]
    had, has = layers // before, layers // after
    at, end, found = (stage - 1) * has, stage * has, []
    while at < end:
        old, first = divmod(at, had)
        count = min(had - first, end - at)
        found.append(LayerRange(old + 1, first, count, had))
        at += count
    return found


def regrouped(stage: int, stages: int, parts: Sequence[tuple[LayerRange, SaveFile]]) -> StageState:
    """The state of a stage of `stages` body stages, without its tensors.

    Its layers share one count of Adam's steps, the least of theirs: as after a rebuild, estimates
    soon consist of new gradients. A layer's share of its stage's gradient norm is unknown and not
    needed after the next step; layers count alike. A boost lasts as long as the newest.
    """
    states = [save.state for _, save in parts]
    one, newest = states[0], max(states, key=lambda state: state.boosted_at)
    last = pb.Commit()
    last.CopyFrom(one.last)
    for scales, those in (
        (last.clip_scale, one.last.clip_scale),
        (last.lr_scale, newest.last.lr_scale),
    ):
        del scales[:]
        if has_for(those, newest.id.stage):
            scales.append(of_stage(those, newest.id.stage))
    last.ClearField("signature")  # no driver has signed this commit
    return StageState(
        id=StateId.after(last, stage, one.id.lineage + 1, one.id.step),
        tensors={},
        omega=sum(save.state.omega * piece.layers / piece.of for piece, save in parts),
        boosted_at=newest.boosted_at,
        last=last,
        optimizer_step=min(state.optimizer_step for state in states),
    )


def moment_scale(decay: float, before: int, after: int) -> float:
    """Factor that turns a moment after `before` updates into the same average after `after`."""
    return (1 - decay**after) / (1 - decay**before) if before else 1.0


def stages_of(saves: Iterable[SaveFile], config: ModelConfig) -> int:
    """The number of body stages of one run's saves. Raises RegroupError if they are of another
    model than `config`."""
    first, body = config.trained
    layer = body // config.layers_per_stage
    had = set()
    for save in saves:
        values, stage = save.tensors.get("weights", 0), save.state.id.stage
        if (values != first) if stage == 0 else (not values or values % layer):
            wanted = f"{first} of its stage 0" if stage == 0 else f"{layer} of each of its layers"
            raise RegroupError(
                f"{save.path} is of another model: it has {values} weights, and this one {wanted}. "
                "[model] and [data] of the run file have to be those of the saves' run, but for "
                "model.stages"
            )
        if stage:
            had.add(values // layer)
    if len(had) != 1 or config.layers % min(had):
        said = " and ".join(map(str, sorted(had))) or "no"
        raise RegroupError(
            f"these saves are of stages with {said} layers, and the model has {config.layers}: "
            "name the folders with all saves of one run, and model.layers as it had them"
        )
    return config.layers // min(had)


def choose(saves: Sequence[SaveFile], stages: int) -> tuple[Resume, dict[int, list[SaveFile]]]:
    """Where a run of `stages` body stages resumes with these saves, and the whole saves of each
    stage for that; the log names damaged ones. Raises RegroupError if there is none."""
    left, sound = {str(save.path): save for save in saves}, set[str]()
    while True:
        held = []
        for path, save in left.items():
            state = save.state.id
            source = Source(path, state.stage, state.step, state.lineage)
            held.append(Held("save", source, state.made))
        found = resume(held, stages)
        if found is None:
            raise RegroupError("there is no save of any stage")
        paths = {of: [one.source.node for one in chosen] for of, chosen in found.held.items()}
        unread = [path for of in paths.values() for path in of if path not in sound]
        for path in unread:
            try:
                left[path].check()
                sound.add(path)
            except SaveError as error:
                log.warning("refused a save: %s", error)
                del left[path]
        if all(path in left for path in unread):
            return found, {of: [left[path] for path in one] for of, one in paths.items()}


def regroup(
    saves: Sequence[SaveFile],
    config: ModelConfig,
    open_folder: Callable[[int], Saves],
    betas: tuple[float, float] = BETAS,
) -> Resume:
    """Write one run's saves anew for the stages of `config`, into the folder that `open_folder`
    has for each; `betas` are the run's. Returns what they were made of. Raises RegroupError,
    SaveError, OSError."""
    had = stages_of(saves, config)
    found, chosen = choose(saves, had)
    if not found.exact and had != config.stages:
        raise RegroupError(
            f"{found.reason}. Layers are regrouped at one step: bring the saves that lack, or "
            f"go on with {had} stages, as it was, until each has saved"
        )
    for stage in range(config.stages + 1):
        parts = pieces(stage, config.layers, had, config.stages)
        if all(piece.stage in chosen for piece in parts):
            made_of = [(piece, chosen[piece.stage][0]) for piece in parts]
            _write(open_folder(stage), regrouped(stage, config.stages, made_of), made_of, betas)
    return found


def of_one_run(saves: Sequence[SaveFile], but: str = "") -> list[SaveFile]:
    """All saves but those of the run `but`, whose folders may be among the others. Raises
    RegroupError for none, and for saves of several runs."""
    found = [save for save in saves if save.run != but]
    runs = sorted({save.run for save in found})
    if not runs:
        raise RegroupError(
            f"there is no save{f' of another run than {but}' if but else ''}: name folders as "
            "--save-dir had them, in which there are stage-0, stage-1, ..."
        )
    if len(runs) > 1:
        where = ", ".join(
            f"{run} in {next(save for save in found if save.run == run).path.parent}"
            for run in runs
        )
        raise RegroupError(f"these are saves of several runs ({where}): name folders of one")
    return found


def _write(
    folder: Saves,
    state: StageState,
    parts: Sequence[tuple[LayerRange, SaveFile]],
    betas: tuple[float, float],
) -> None:
    saves = [save for _, save in parts]
    names = [name for name in saves[0].tensors if all(name in save.tensors for save in saves)]
    if names == ["weights"]:  # the moments of some are unknown
        state = replace(state, optimizer_step=0)
    decays = dict(zip(MOMENTS, betas, strict=True))
    tensors = {name: _joined(name, parts, state.optimizer_step, decays.get(name)) for name in names}
    folder.write_pieces(state, tensors)


def _joined(
    name: str,
    parts: Sequence[tuple[LayerRange, SaveFile]],
    optimizer_step: int,
    decay: float | None,
) -> Values:
    """A new stage's tensor; `decay` is a moment's decay in an update, None for weights."""
    sizes = [save.tensors[name] // piece.of for piece, save in parts]  # values in a layer
    counts = [size * piece.layers for size, (piece, _) in zip(sizes, parts, strict=True)]

    def made() -> Iterator[Bytes]:
        for size, count, (piece, save) in zip(sizes, counts, parts, strict=True):
            scale, had = 1.0, save.state.optimizer_step
            if decay is not None and had != optimizer_step:
                scale = moment_scale(decay, had, optimizer_step)
            for chunk in save.values(name, size * piece.first, count):
                if scale != 1.0:
                    chunk.view(np.float32)[:] *= np.float32(scale)
                yield chunk

    return Values(sum(counts), made)
