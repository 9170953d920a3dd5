"""Converts a run's saves for a run that has the same model in other stages.

A stage's flat tensors contain its layers in order, which are all of one size. So a new stage's
tensors are pieces of the old ones', concatenated, and copied from file to file in chunks. The new
saves belong to another run, whose nodes accept no others, and to another lineage than the old ones.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import numpy as np

from planaria.node.model.shape import ModelConfig
from planaria.node.state.save_file import Bytes, Pieces, SaveFile
from planaria.node.state.saves import Saves
from planaria.node.state.stage_state import TENSORS, SaveError, StageState, StateId
from planaria.node.transaction.commits import has_for, of_stage
from planaria.node.wire import stage_pb2 as pb
from planaria.recovery.decide import Resume, resume
from planaria.recovery.facts import Held, Source

log = logging.getLogger(__name__)


class LayerRange(NamedTuple):
    """Consecutive layers of an old stage."""

    stage: int
    first: int  # index within the stage, from 0
    layers: int
    of: int  # layers of the whole stage


def layer_ranges(stage: int, before: ModelConfig, after: ModelConfig) -> list[LayerRange]:
    """The pieces of a stage of the model `after`, in order, whose layers were divided as in
    `before`. Stage 0 isn't divided: it counts as one layer, and stays."""
    if stage == 0:
        return [LayerRange(0, 0, 1, 1)]
    wanted, ranges = after.layers_of(stage), []
    for old, size in enumerate(before.cut, start=1):
        had = before.layers_of(old)
        start, end = max(had.start, wanted.start), min(had.stop, wanted.stop)
        if start < end:
            ranges.append(LayerRange(old, start - had.start, end - start, size))
    return ranges


def regrouped_state(stage: int, parts: Sequence[tuple[LayerRange, SaveFile]]) -> StageState:
    """The state of a stage, without its tensors.

    Its layers share one count of Adam's steps, the least of theirs: as after a rebuild, estimates
    soon consist of new gradients. A layer's share of its stage's gradient norm is unknown and not
    needed after the next step; layers count alike. A boost lasts as long as the newest.
    """
    states = [save.state for _, save in parts]
    first, newest = states[0], max(states, key=lambda state: state.boosted_at)
    last = pb.Commit()
    last.CopyFrom(first.last)
    for target, scales_of in (
        (last.clip_scale, first.last.clip_scale),
        (last.lr_scale, newest.last.lr_scale),
    ):
        del target[:]
        if has_for(scales_of, newest.id.stage):
            target.append(of_stage(scales_of, newest.id.stage))
    last.ClearField("signature")  # no driver has signed this commit
    return StageState(
        id=StateId.after(last, stage, first.id.lineage + 1, first.id.step),
        tensors={},
        omega=sum(save.state.omega * piece.layers / piece.of for piece, save in parts),
        boosted_at=newest.boosted_at,
        last=last,
        optimizer_step=min(state.optimizer_step for state in states),
    )


def moment_scale(decay: float, before: int, after: int) -> float:
    """Factor that turns a moment after `before` updates into the same average after `after`."""
    return (1 - decay**after) / (1 - decay**before) if before else 1.0


def _check_same_stages(saves: Iterable[SaveFile], config: ModelConfig) -> ModelConfig:
    """The model of saves whose layers differ in shape along the depth, so that other stages can't
    be made of them. Raises SaveError unless the saves are of these very stages."""
    for save in saves:
        values, stage = save.tensors.get("weights", 0), save.state.id.stage
        wanted = config.trained_in(stage) if stage <= config.stages else 0
        if values != wanted:
            raise SaveError(
                f"{save.path} has {values} weights, and stage {stage} of {config.stages} has "
                f"{wanted}: layers of this model differ in shape, so keep model.stages, and name "
                "only saves of this model"
            )
    return config


def model_as_saved(saves: Iterable[SaveFile], config: ModelConfig) -> ModelConfig:
    """The model with the stages that one run's saves have. Raises SaveError if they are of another
    model than `config`."""
    if config.own is not None and config.own.others:
        return _check_same_stages(saves, config)
    first, layer = config.trained[0], config.trained_in(1) // config.cut[0]
    lengths, stages, sizes = set[tuple[int, int]](), 0, tuple[int, ...]()
    for save in saves:
        values, stage = save.tensors.get("weights", 0), save.state.id.stage
        if (values != first) if stage == 0 else (not values or values % layer):
            wanted = f"the {first} of stage 0" if stage == 0 else f"{layer} for each layer"
            raise SaveError(
                f"{save.path} is of another model: it has {values} weights instead of {wanted}. "
                "Only model.stages may differ from the run file of the saves in [model] and [data]"
            )
        if stage:
            lengths.add((stage, values // layer))
        stages, sizes = save.stages, save.sizes
    counts = sorted({layers for _, layers in lengths})
    with suppress(ValueError):
        stages = stages or (config.layers // counts[0] if counts else 0)  # unknown in old saves
        before = replace(config, stages=stages, sizes=sizes)
        if lengths <= {*enumerate(before.cut, start=1)}:
            return before
    raise SaveError(
        f"these saves are of stages with {' and '.join(map(str, counts)) or 'no'} layers, and the "
        f"model has {config.layers}: name the folders with all saves of one run, and give that "
        "run's model.layers"
    )


def whole_steps(saves: Iterable[SaveFile], stages: int) -> list[int]:
    """The steps of which each of stages 0 to `stages` has a save, in order."""
    having: defaultdict[int, set[int]] = defaultdict(set)
    for save in saves:
        having[save.state.id.step].add(save.state.id.stage)
    return sorted(step for step, of in having.items() if len(of) > stages)


def choose_saves(
    saves: Sequence[SaveFile], stages: int
) -> tuple[Resume, dict[int, list[SaveFile]]]:
    """Where a run of `stages` body stages resumes with these saves, and the whole saves of each
    stage for that; the log names damaged ones. Raises SaveError if there is none."""
    candidates, sound = {str(save.path): save for save in saves}, set[str]()
    while True:
        holdings = []
        for path, save in candidates.items():
            state = save.state.id
            source = Source(path, state.stage, state.step, state.lineage)
            holdings.append(Held("save", source, state.made, state.digest))
        resumed = resume(holdings, stages)
        if resumed is None:
            raise SaveError("there is no readable save of any stage: name other folders")
        paths = {
            stage: [paths_of_stage.source.node for paths_of_stage in chosen]
            for stage, chosen in resumed.held.items()
        }
        unread = [path for stage in paths.values() for path in stage if path not in sound]
        for path in unread:
            try:
                candidates[path].check()
                sound.add(path)
            except SaveError as error:
                log.warning("refused a save: %s", error)
                del candidates[path]
        if all(path in candidates for path in unread):
            return resumed, {
                stage: [candidates[path] for path in paths_of_stage]
                for stage, paths_of_stage in paths.items()
            }


def rewrite_saves(
    chosen: tuple[Resume, Mapping[int, Sequence[SaveFile]]],
    config: ModelConfig,
    open_folder: Callable[[int], Saves],
    betas: tuple[float, float],
) -> None:
    """Write the saves that `choose_saves` has chosen anew for the stages of `config`, into the
    folder that `open_folder` has for each; `betas` are the run's. Raises SaveError, OSError."""
    resumed, parts_of = chosen
    before = model_as_saved(chain.from_iterable(parts_of.values()), config)
    if not resumed.exact and before.cut != config.cut:
        raise SaveError(
            f"{resumed.reason}. Layers are regrouped at one step: bring the saves that lack, or "
            f"go on with {before.stages} stages, as it was, until each has saved"
        )
    for stage in range(config.stages + 1):
        parts = layer_ranges(stage, before, config)
        if all(piece.stage in parts_of for piece in parts):
            made_of = [(piece, parts_of[piece.stage][0]) for piece in parts]
            state = regrouped_state(stage, made_of)
            names = TENSORS[: config.tensors_in(stage)]
            _write_stage(open_folder(stage), state, made_of, names, betas)


def saves_of_one_run(saves: Sequence[SaveFile], excluded: str = "") -> list[SaveFile]:
    """All saves but those of the run `excluded`, whose folders may be among the others. Raises
    SaveError for none, and for saves of several runs."""
    others = [save for save in saves if save.run != excluded]
    runs = sorted({save.run for save in others})
    if not runs:
        raise SaveError(
            f"there is no save{f' of a run other than {excluded}' if excluded else ''}: "
            "name folders given as --save-dir, which contain stage-0, stage-1, ..."
        )
    if len(runs) > 1:
        where = ", ".join(
            f"{run} in {next(save for save in others if save.run == run).path.parent}"
            for run in runs
        )
        raise SaveError(f"these are saves of several runs ({where}): name folders of one")
    return others


def _write_stage(
    folder: Saves,
    state: StageState,
    parts: Sequence[tuple[LayerRange, SaveFile]],
    names: tuple[str, ...],
    betas: tuple[float, float],
) -> None:
    if not all(save.tensors.keys() >= {*names} for _, save in parts):
        names = TENSORS[:1]  # the moments of some are unknown, or of another optimizer
        state = replace(state, optimizer_step=0)
    # Only Adam's updates divide moments by their bias corrections, Muon's don't.
    decays = dict(zip(TENSORS[1:], betas, strict=True)) if len(names) == len(TENSORS) else {}
    tensors = {
        name: _joined_layers(name, parts, state.optimizer_step, decays.get(name)) for name in names
    }
    folder.write_pieces(state, tensors)


def _joined_layers(
    name: str,
    parts: Sequence[tuple[LayerRange, SaveFile]],
    optimizer_step: int,
    decay: float | None,
) -> Pieces:
    """A new stage's tensor; `decay` is a moment's decay in an update, None for weights."""
    sizes = [save.tensors[name] // piece.of for piece, save in parts]  # values in a layer
    counts = [size * piece.layers for size, (piece, _) in zip(sizes, parts, strict=True)]

    def read_pieces() -> Iterator[Bytes]:
        for size, count, (piece, save) in zip(sizes, counts, parts, strict=True):
            scale, steps_before = 1.0, save.state.optimizer_step
            if decay is not None and steps_before != optimizer_step:
                scale = moment_scale(decay, steps_before, optimizer_step)
            for chunk in save.values(name, size * piece.first, count):
                if scale != 1.0:
                    chunk.view(np.float32)[:] *= np.float32(scale)
                yield chunk

    return Pieces(sum(counts), read_pieces)
