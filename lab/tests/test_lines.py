from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from planaria_lab.lines import distinct_style, name_at_the_ends, spaced


def test_lines_that_coincide_are_all_seen() -> None:
    styles = [distinct_style(place, 14, points=61) for place in range(14)]
    assert len({(style["color"], str(style["linestyle"])) for style in styles}) == 14
    assert len({style["marker"] for style in styles}) == 14
    for before, after in pairwise(styles):
        assert after["linewidth"] < before["linewidth"]
        assert after["markevery"][0] >= before["markevery"][0]
    assert len({style["markevery"][0] for style in styles}) == 10, "of 61 points every tenth"


def test_one_line_and_few_points() -> None:
    assert "marker" not in distinct_style(0, 1)
    assert distinct_style(2, 3, points=2)["markevery"] == (0, 1)


@given(st.lists(st.floats(0, 1), max_size=8), st.floats(0.01, 0.3))
def test_names_are_moved_no_further_than_they_have_to(places: list[float], gap: float) -> None:
    moved = spaced(places, gap)
    by_place = sorted(zip(places, moved, strict=True))
    for (_, before), (_, after) in pairwise(by_place):
        assert after - before >= gap - 1e-9
    assert sum(moved) == pytest.approx(sum(places))
    if all(after - before >= gap for (before, _), (after, _) in pairwise(by_place)):
        assert moved == pytest.approx(places)


def test_each_line_is_named_beside_its_end() -> None:
    axes = Figure().add_subplot()
    for height, name in ((1.0, "high"), (0.5, "low"), (0.501, "nearly as low")):
        axes.plot([0, 1], [0.0, height], label=name)
    axes.set_ylim(0, 1)
    name_at_the_ends(axes)
    places = {text.get_text(): text.get_position()[1] for text in axes.texts}
    assert places["low"] < 0.5 < places["nearly as low"] < places["high"] == pytest.approx(1.0)
