"""Figures for Prometheus, all of which docs/metrics.md lists."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from planaria.bootstrap.registry_pb2 import (
    Cut,
    Description,
    LinkReport,
    Member,
    MemberDescription,
    Quarantined,
    Report,
    Seat,
    SeatReport,
    View,
)
from planaria.node.page import metrics
from planaria.node.page.app import metrics_app
from planaria.node.page.metrics import (
    ALL,
    AT_NODE,
    COUNTER,
    exposition,
    node_points,
    registry_points,
)
from planaria.node.report.history import History
from planaria.node.run_file import RunFile, override

ROOT = Path(__file__).parents[3]
RUN = override(RunFile(), model__stages=1, model__vocabulary=300, steps=50)
REPORT = Report(
    seats=[SeatReport(stage=1, committed=7, loss=6.5, microbatches=56, in_flight=9)],
    bytes_in=10,
    bytes_out=20,
    memory=8 * 10**9,
    unlisted=2,
    links=[
        LinkReport(peer="11bb", rtt_ms=25.0, mbps=80.0),
        LinkReport(peer="whatever it likes", rtt_ms=1.0, mbps=1.0),
    ],
)


def member(node: str) -> MemberDescription:
    of = Member(node=node, seats=[Seat(stage=1)], speed=45.5)
    return MemberDescription(member=of, report=REPORT, since_renewal=0.5)


def read(text: bytes) -> dict[str, dict[tuple[str, ...], float]]:
    """Return values by name, then by the values of the labels but `run`."""
    samples: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            assert sample.labels["run"] == "prose-1"
            labels = tuple(sample.labels[name] for name in ALL[sample.name].labels)
            samples.setdefault(sample.name, {})[labels] = sample.value
    return samples


def samples_of(*members: MemberDescription) -> dict[str, dict[tuple[str, ...], float]]:
    description = Description(
        run="prose-1",
        view=View(number=4, committed=7),
        members=members,
        cuts=[Cut(a="00aa", b="11bb")],
        quarantined=[Quarantined(node="99ff", seconds=math.inf)],
    )
    history = History(RUN.steps)
    history.rebuilt[2, "checkfree"] = 3
    history.validation.add(5, 6.25)
    history.node_seconds = 90.0
    return read(exposition("prose-1", registry_points(description, history, RUN)))


def test_a_registry_tells_of_run_stages_nodes_and_links() -> None:
    samples = samples_of(member("11bb"))
    node, seat = ("11bb",), ("1", "11bb")
    assert samples["planaria_committed_steps_total"] == {(): 7}
    assert samples["planaria_steps"] == {(): 50}
    tokens = 7 * RUN.training.batch * RUN.model.config.context
    assert samples["planaria_trained_tokens_total"] == {(): tokens}
    assert samples["planaria_loss"] == {(): 6.5}
    assert samples["planaria_validation_loss"] == {(): 6.25}
    assert samples["planaria_nodes"] == {("0",): 0, ("1",): 1, ("standby",): 0}
    assert samples["planaria_seat_committed_steps_total"] == {seat: 7}
    assert samples["planaria_seat_microbatches_total"] == {seat: 56}
    assert samples["planaria_seat_in_flight_microbatches"] == {seat: 9}
    assert samples["planaria_node_receive_bytes_total"] == {node: 10}
    assert samples["planaria_node_links_missing"] == {node: 2}
    assert samples["planaria_link_round_trip_seconds"] == {("11bb", "11bb"): 0.025}
    assert samples["planaria_link_bytes_per_second"] == {("11bb", "11bb"): 1e7}
    assert samples["planaria_rebuilds_total"] == {("2", "checkfree"): 3}
    assert samples["planaria_node_seconds_total"] == {(): 90}
    assert samples["planaria_quarantined_nodes"] == samples["planaria_cut_links"] == {(): 1}
    assert samples.keys() == ALL.keys() - AT_NODE.keys(), "a figure is promised that nobody tells"


def test_a_node_tells_of_itself_and_of_its_time() -> None:
    seconds = {"compute": 5.0, "idle": 1.0, "total": 6.0}
    samples = read(exposition("prose-1", node_points("11bb", REPORT, seconds)))
    spent = {("11bb", "compute"): 5.0, ("11bb", "idle"): 1.0}
    assert samples["planaria_node_time_seconds_total"] == spent
    assert samples.keys() == metrics.OF_NODE.keys() | AT_NODE.keys()


def test_before_anything_is_known_no_figure_is_made_up() -> None:
    text = exposition("r", registry_points(Description(run="r"), History(50), RUN))
    assert b"planaria_loss" not in text and b"planaria_nodes{" in text


def test_what_nodes_call_themselves_is_escaped() -> None:
    hostile = 'a"} 1\nplanaria_loss{run="prose-1'
    samples = samples_of(member(hostile))
    assert samples["planaria_node_receive_bytes_total"] == {(hostile,): 10}
    assert samples["planaria_loss"] == {(): 6.5}


def test_of_many_nodes_not_each_has_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "MOST_NODES", 2)
    monkeypatch.setattr(metrics, "MOST_LINKED", 2)
    samples = samples_of(*(member(f"{n}") for n in range(5)))
    assert len(samples["planaria_node_silence_seconds"]) == 2
    assert samples["planaria_nodes"]["1",] == 5
    assert "planaria_link_bytes_per_second" not in samples


def test_the_table_of_the_docs_is_that_of_the_code() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (.*?) ?\| (.*) \|$", text, re.MULTILINE)
    assert [row[0] for row in rows] == [*ALL]
    for name, kind, labels, meaning in rows:
        assert (kind == "counter") == (ALL[name].type is COUNTER), name
        assert re.findall(r"`(\w+)`", labels) == [*ALL[name].labels], name
        assert meaning == ALL[name].meaning, name


def test_the_board_asks_for_what_there_is() -> None:
    board = (ROOT / "docker" / "grafana" / "planaria.json").read_text(encoding="utf-8")
    asked = set(re.findall(r"planaria_\w+", board)) - {"planaria_"}
    assert asked and asked <= ALL.keys()


def test_prometheus_is_told_where_the_registry_is() -> None:
    compose = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text(encoding="utf-8"))
    scraped = yaml.safe_load((ROOT / "docker" / "prometheus.yml").read_text(encoding="utf-8"))
    [job] = scraped["scrape_configs"]
    [target] = job["static_configs"][0]["targets"]
    service, _, port = target.partition(":")
    environment = compose["services"][service]["environment"]
    assert environment["PLANARIA_BOOTSTRAP_HTTP"].endswith(f":{port}")
    assert compose["services"]["prometheus"]["profiles"] == ["metrics"]
    assert compose["services"]["grafana"]["profiles"] == ["metrics"]


def test_who_has_no_token_gets_no_figures() -> None:
    async def figures() -> bytes:
        return b"planaria_loss 1.0\n"

    app = metrics_app(figures, token="secret", local=False)
    scraper = TestClient(app)
    assert scraper.get("/metrics").status_code == 401
    answer = scraper.get("/metrics", headers={"Authorization": "Bearer secret"})
    assert answer.text == "planaria_loss 1.0\n"
    assert answer.headers["content-type"].startswith("text/plain; version=")
