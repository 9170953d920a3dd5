from itertools import pairwise

from planaria.lab.lines import told_apart


def test_lines_that_coincide_are_all_seen() -> None:
    styles = [told_apart(place, 14, points=61) for place in range(14)]
    assert len({(style["color"], str(style["linestyle"])) for style in styles}) == 14
    assert len({style["marker"] for style in styles}) == 14
    for before, after in pairwise(styles):
        assert after["linewidth"] < before["linewidth"]
        assert after["markevery"][0] >= before["markevery"][0]
    assert len({style["markevery"][0] for style in styles}) == 10, "of 61 points every tenth"


def test_one_line_and_few_points() -> None:
    assert "marker" not in told_apart(0, 1)
    assert told_apart(2, 3, points=2)["markevery"] == (0, 1)
