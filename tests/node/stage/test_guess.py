"""Guesses of a lost stage from other stages, which may have more layers or fewer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from planaria.node.model.layout import model_weights
from planaria.node.run_file import RunFile
from planaria.node.stage.initial import InitialStages
from planaria.node.stage.torch_stage import guess_stage
from planaria.recovery.checkfree import GuessSource, guess
from tests.node.state.small_saves import model

CUTS = {
    "between two larger ones": ((3, 2, 3), 2, {1: 3.0, 3: 1.0}, [1.25, 3.25], 4 / 3),
    "between unlike ones": ((1, 2, 4), 2, {1: 2.0, 3: 8.0}, [2.0, 3.0], 4.0),
    "the last from a smaller one": ((3, 2, 3), 3, {2: 2.0}, [3.0, 4.0, 4.0], 3.0),
    "the first from a larger one": ((2, 3), 1, {2: 3.0}, [2.0, 4.0], 2.0),
    "of one layer": ((5, 1, 1), 2, {1: 5.0, 3: 1.0}, [4.0], 1.0),
}


@pytest.mark.parametrize(("cut", "lost", "omegas", "layers", "omega"), CUTS.values(), ids=CUTS)
def test_each_layer_comes_from_those_at_its_relative_depth(
    cut: tuple[int, ...], lost: int, omegas: dict[int, float], layers: list[float], omega: float
) -> None:
    """All weights of a layer are its number."""
    config = model(sum(cut), len(cut), sizes=cut)

    def numbers(stage: int) -> torch.Tensor:
        size = config.trained_in(stage) // cut[stage - 1]
        return torch.tensor(config.layers_of(stage)).float().repeat_interleave(size)

    sources = [GuessSource(stage, numbers(stage), omega) for stage, omega in omegas.items()]
    guess, its_omega = guess_stage(InitialStages(RunFile(), config), lost, "checkfree", sources)
    assert guess.view(cut[lost - 1], -1).unique(dim=1).flatten().tolist() == layers
    assert its_omega == pytest.approx(omega)


@given(st.integers(1, 3), st.integers(0, 99), st.floats(0, 9), st.floats(0, 9))
def test_of_equal_stages_it_is_the_average_to_the_last_bit(
    size: int, seed: int, before: float, after: float
) -> None:
    config = model(3 * size, 3)
    drawn = torch.Generator().manual_seed(seed)
    values = torch.rand(2, config.trained_in(1), generator=drawn)
    sources = [GuessSource(1, values[0], before), GuessSource(3, values[1], after)]
    expected, omega = guess(2, "checkfree", sources)
    guessed = guess_stage(InitialStages(RunFile(), config), 2, "checkfree", sources)
    assert torch.equal(guessed[0], expected)
    assert guessed[1] == omega
    in_words = replace(config, sizes=(size,) * 3)
    assert model_weights(in_words) == model_weights(config)
