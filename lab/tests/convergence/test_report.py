from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from planaria_lab.convergence.report import Line, plot_costs, plot_curves, rows, table
from planaria_lab.convergence.study import Study

STUDY = Path("study.toml")
ORIGIN = {"machine": "abacus, 2 cores", "torch": "2.13.0", "commit": "f00", "at": 1}


@pytest.fixture
def study() -> Study:
    names = ("none", "guessed", "relearned", "nothing yet")
    return Study.model_validate(
        {
            "title": "Three ways",
            "seeds": [0, 1],
            "run": {"steps": 30},
            "baseline": "none",
            "reference": "guessed",
            "target": 20,
            "variants": [{"name": name} for name in names],
        }
    )


def line(name: str, seed: int, *losses: float, relearned: int = 0) -> Line:
    """Return a run with these losses after 0, 10, 20, 30 iterations."""
    rebuild: dict[str, Any] = {"iteration": 12, "stage": 2}
    if relearned:
        rebuild["relearned"] = {
            **{"before": 0.5, "stage_tokens": relearned, "stage_updates": 12},
            **{"background_stage_tokens": relearned // 3, "background_stage_updates": 4},
        }
    return {
        "variant": name,
        "seed": seed,
        "validation": [(10 * place, 10 * place, loss) for place, loss in enumerate(losses)],
        "rebuilds": [] if name == "none" else [rebuild],
        "texts": {},
        "window": 100,
        "share": 0.25,
        "update_tokens": 50.0,
        "seconds": 60.0,
        **ORIGIN,
    }


@pytest.fixture
def runs() -> dict[tuple[str, int], Line]:
    lines = [
        line("none", 0, 7.0, 6.0, 5.0, 4.0),
        line("none", 1, 7.0, 6.0, 5.0, 4.0),
        line("guessed", 0, 7.0, 6.0, 5.5, 5.0),  # 10 iterations behind "none"
        line("guessed", 1, 7.0, 6.0, 5.5, 4.5),
        line("relearned", 0, 7.0, 6.0, 5.5, 4.2, relearned=1200),
    ]
    return {(entry["variant"], entry["seed"]): entry for entry in lines}


def cells(text: str, name: str) -> dict[str, str]:
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    (values,) = (line for line in lines if line[0] == name)
    return dict(zip(lines[0], values, strict=True))


def test_a_row_is_compared_seed_by_seed(study: Study, runs: dict[tuple[str, int], Line]) -> None:
    text = table(study, rows(study, runs), STUDY)
    assert "5 runs, 5 minutes" in text
    guessed, relearned = cells(text, "guessed"), cells(text, "relearned")
    assert guessed["above the baseline"] == "+0.7500 ± 0.3536"
    assert guessed["extra iterations to the loss of step 20"] == "+8 ± 4"
    assert guessed["iterations behind"] == "8 ± 4"
    assert relearned["seeds"] == "1"
    assert relearned["share of the reference"] == "0.20"  # 0.2 of 1.0, by the common seed
    assert relearned["relearning, iterations of computing"] == "4.5"  # (1200 + 12 * 50) / 400
    assert relearned["... in the background"] == "1.5"
    assert relearned["... of waiting"] == "12"
    assert relearned["behind and computing, share of the reference"] == "0.65"  # 2 + 4.5 of 10
    assert relearned["... without the background's"] == "0.50"
    assert set(cells(text, "nothing yet").values()) == {"nothing yet", "0", "0.0", "-"}


@pytest.mark.parametrize(
    ("other", "seeds"),
    [
        ({"commit": "f01"}, "2, other commit"),
        ({"machine": "abacus, 8 cores"}, "2"),
        ({"machine": "slide rule, 2 cores"}, "1, 1 unpaired"),
        ({"torch": "3.0"}, "1, 1 unpaired"),
    ],
)
def test_a_run_is_compared_only_with_one_of_its_processor_and_torch(
    study: Study, runs: dict[tuple[str, int], Line], other: Line, seeds: str
) -> None:
    runs["guessed", 1] = {**runs["guessed", 1], **other}
    compared = rows(study, runs)
    text = table(study, compared, STUDY)
    guessed = cells(text, "guessed")
    assert guessed["seeds"] == seeds
    paired = "unpaired" not in seeds
    assert guessed["above the baseline"] == ("+0.7500 ± 0.3536" if paired else "+1.0000")
    assert [word in text for word in ("\n- other commit:", "\n- unpaired:")] == [
        "commit" in seeds,
        not paired,
    ]


def test_a_variant_may_have_a_reference_of_its_own(
    study: Study, runs: dict[tuple[str, int], Line]
) -> None:
    other = [
        variant.model_copy(update={"reference": "relearned" if variant.name == "guessed" else ""})
        for variant in study.variants
    ]
    text = table(study.model_copy(update={"variants": other}), rows(study, runs), STUDY)
    assert cells(text, "guessed")["share of the reference"] == "5.00"  # 1.0 of 0.2
    assert cells(text, "relearned")["share of the reference"] == "0.20"
    assert "`relearned` is the reference of: guessed." in text
    assert "`guessed` is the reference of: none, relearned, nothing yet." in text


def test_plots_are_drawn(study: Study, runs: dict[tuple[str, int], Line], tmp_path: Path) -> None:
    for plot in (plot_curves, plot_costs):
        path = tmp_path / f"{plot.__name__}.png"
        plot(study, rows(study, runs), path)
        assert path.read_bytes().startswith(b"\x89PNG")
