"""What a model is evaluated on."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from planaria.node.data.corpus import UNSCORED, CorpusError
from planaria.node.hugging_face.evaluate import Portion


def test_all_of_a_text_is_scored(data: Path) -> None:
    portion = Portion(data, "validation", 16, samples=5)
    inputs, targets = portion.rows(0, 3)
    assert inputs.shape == targets.shape == (3, 16)
    assert (targets[:, :-1] == inputs[:, 1:]).all()
    assert portion.rows(3, 3)[0].shape == (2, 16)
    found = portion.evaluation(160.0)
    assert (found.tokens, found.loss) == (80, 2.0)
    assert found.bits_per_byte is not None
    assert "bits per byte" in found.rows()


def test_of_conversations_what_the_assistant_says(conversations: Path) -> None:
    portion = Portion(conversations, "train", 16, samples=None)
    _, targets = portion.rows(0, portion.count)
    scored = int((targets != UNSCORED).sum())
    assert 0 < scored < targets.numel()
    found = portion.evaluation(3.0 * scored)
    assert (found.tokens, found.loss) == (scored, 3.0)
    assert found.perplexity == math.exp(3.0)
    assert list(found.rows()) == ["tokens", "loss", "perplexity"]
    mute = Portion(conversations, "train", 2, samples=1)  # its words are a role, and nobody's
    assert (mute.rows(0, 1)[1] == UNSCORED).all()
    with pytest.raises(CorpusError, match=r"none of the tokens in 1 samples .* is scored"):
        mute.evaluation(0.0)
