"""Tests of clouds' termination notices, from a stand-in that follows their documentation."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from email.utils import formatdate

import pytest

from planaria.node.launch.notices import (
    ADDRESS_VARIABLE,
    CLOUDS,
    LEAST,
    MARGIN,
    SOON,
    Aws,
    Azure,
    Gcp,
    MetadataAnswer,
    Notice,
    ask_metadata,
    find_cloud,
    watch_notices,
)
from tests.metadata_service import NAME, MetadataService, metadata_service

NOW = datetime(2026, 9, 18, 8, 20, tzinfo=UTC).timestamp()
"""Two minutes before the termination time in AWS's example."""

Start = Callable[[str], MetadataService]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Return a function that starts a cloud's metadata service, which this process then asks."""
    with ExitStack() as running:

        def start(cloud: str) -> MetadataService:
            service = running.enter_context(metadata_service(cloud))
            monkeypatch.setenv(ADDRESS_VARIABLE, service.address)
            return service

        yield start


def cloud_of(name: str) -> Aws | Gcp | Azure:
    cloud = find_cloud(name, ask_metadata)
    assert isinstance(cloud, Aws | Gcp | Azure)
    return cloud


@pytest.mark.parametrize("cloud", CLOUDS)
def test_each_cloud_is_found_and_says_nothing_at_first(start: Start, cloud: str) -> None:
    start(cloud)
    for name in ("auto", cloud):
        it = cloud_of(name)
        assert isinstance(it, CLOUDS[cloud])
        assert it.find_notice(NOW) is None


@pytest.mark.parametrize("action", ["terminate", "stop", "hibernate"])
def test_aws_says_what_and_when_and_a_machine_that_it_has_not_taken_after_all_is_used(
    start: Start, action: str
) -> None:
    start("aws").action = {"action": action, "time": "2026-09-18T08:22:00Z"}
    aws = cloud_of("auto")
    assert aws.find_notice(NOW) == Notice(f"AWS: {action} at 2026-09-18T08:22:00Z", 120.0)
    assert aws.find_notice(NOW + 120 + 299) is not None
    assert aws.find_notice(NOW + 120 + 301) is None


def test_a_token_is_renewed_when_it_has_run_out(start: Start) -> None:
    service = start("aws")
    aws = cloud_of("aws")
    for _ in range(3):
        assert aws.find_notice(NOW) is None
    assert sum(line.startswith("PUT") for line in service.asked) == 1
    service.tokens.clear()
    service.action = {"action": "stop", "time": "2026-09-18T08:22:00Z"}
    assert aws.find_notice(NOW) is not None
    assert sum(line.startswith("PUT") for line in service.asked) == 2


def test_gcp_says_that_but_not_when(start: Start) -> None:
    start("gcp").preempted = True
    assert cloud_of("auto").find_notice(NOW) == Notice("GCP: preempted", None)


def event(kind: str, seconds: float | None, *machines: str) -> dict[str, object]:
    """Return an event of Azure, due in so many seconds; None: it has begun."""
    return {
        "EventId": "602d9444-d2cd-49c7-8624-8643e7171297",
        "EventType": kind,
        "ResourceType": "VirtualMachine",
        "Resources": list(machines),
        "EventStatus": "Started" if seconds is None else "Scheduled",
        "NotBefore": "" if seconds is None else formatdate(NOW + seconds, usegmt=True),
        "Description": "",
        "EventSource": "Platform",
        "DurationInSeconds": -1,
    }


@pytest.mark.parametrize(
    ("events", "left"),
    [
        ([], None),
        ([event("Preempt", 30, NAME)], 30.0),
        ([event("Preempt", 30, "worker_2", NAME)], 30.0),
        ([event("Preempt", 30, "worker_2")], None),
        ([event("Freeze", 900, NAME)], None),
        ([event("Redeploy", 600, NAME), event("Terminate", 300, NAME)], 300.0),
        ([event("Preempt", None, NAME)], 0.0),
    ],
)
def test_azure_tells_of_this_machine_and_of_others(
    start: Start, events: list[dict[str, object]], left: float | None
) -> None:
    start("azure").events = events
    notice = cloud_of("auto").find_notice(NOW)
    assert (notice.left if notice else None) == left


def test_azure_has_time_for_its_first_answer_about_events() -> None:
    timeouts: list[float] = []

    def slow(method: str, path: str, headers: object, timeout: float = 2.0) -> MetadataAnswer:
        timeouts.append(timeout)
        return MetadataAnswer(200, {}, NAME if "name" in path else '{"Events": []}')

    azure = Azure(slow)
    assert azure.is_here()
    azure.find_notice(NOW)
    azure.find_notice(NOW)
    assert timeouts == [2.0, 130.0, 2.0]


@pytest.mark.parametrize(
    ("left", "grace"),
    [(120.0, 120.0 - MARGIN), (30.0, 30.0 - MARGIN), (0.0, LEAST), (-60.0, LEAST), (None, 25.0)],
)
def test_a_notice_leaves_time(left: float | None, grace: float) -> None:
    assert Notice("", left).grace(default=25.0) == grace


def answering(status: int, body: str) -> Callable[..., MetadataAnswer]:
    return lambda *_, **__: MetadataAnswer(status, {}, body)


@pytest.mark.parametrize("cloud", [Aws, Gcp, Azure])
@pytest.mark.parametrize(
    ("status", "body"),
    [
        (200, ""),
        (200, "<html>"),
        (200, "[]"),
        (200, '{"action": 3, "Events": [{}]}'),
        (200, '{"action": "stop", "time": "soon", "Events": [7]}'),
        (500, "{}"),
    ],
)
def test_an_answer_that_is_none_is_no_notice(
    cloud: Callable[..., Aws | Gcp | Azure], status: int, body: str
) -> None:
    with pytest.raises((ValueError, KeyError, TypeError)):
        cloud(answering(status, body)).find_notice(NOW)


def test_at_home_nobody_or_another_web_server_answers_and_nothing_is_said(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Only one attempt to connect is made."""
    caplog.set_level(logging.DEBUG)
    tried: list[str] = []

    def unreachable(
        method: str, path: str, headers: object, timeout: float = 2.0
    ) -> MetadataAnswer:
        tried.append(path)
        raise TimeoutError("timed out")

    assert find_cloud("auto", unreachable) is None
    assert len(tried) == 1
    monkeypatch.setenv(ADDRESS_VARIABLE, "127.0.0.1:1")  # nobody listens there
    assert find_cloud("auto", ask_metadata) is None
    start("nobody")
    assert find_cloud("auto", ask_metadata) is None
    assert caplog.records == []


def test_a_container_to_which_no_token_gets_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """AWS answers, but its answer to a PUT, with a hop limit of 1, reaches only the host."""

    def beyond_one_hop(method: str, *_: object, **__: object) -> MetadataAnswer:
        if method == "PUT":
            raise TimeoutError("timed out")
        return MetadataAnswer(401, {}, "")

    assert find_cloud("auto", beyond_one_hop) is None
    assert "hop limit to 2" in caplog.text


async def test_a_watch_tells_of_the_notice(start: Start) -> None:
    service = start("aws")
    notices: asyncio.Queue[Notice] = asyncio.Queue()
    watch_notices("auto", notices.put_nowait)
    await asyncio.to_thread(service.wait_until_asked, 3)
    assert notices.empty()
    service.action = {"action": "terminate", "time": datetime.now(UTC).isoformat()}
    notice = await asyncio.wait_for(notices.get(), 60)
    assert notice.left is not None
    assert notice.left < SOON


async def test_a_watch_waits_where_the_end_is_far_and_goes_on_after_nonsense(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("planaria.node.launch.notices.POLL", 0.01)
    service = start("azure")
    now = datetime.now(UTC).timestamp()
    service.events = [event("Redeploy", now - NOW + 7 * 86400, NAME)]
    notices: asyncio.Queue[Notice] = asyncio.Queue()
    watch_notices("azure", notices.put_nowait)

    await asyncio.to_thread(service.wait_until_asked, 3)
    service.events = [{"Resources": None}]
    await asyncio.to_thread(service.wait_until_asked, 3)
    assert notices.empty()
    service.events = [event("Preempt", now - NOW + 30, NAME)]
    notice = await asyncio.wait_for(notices.get(), 60)
    assert notice.event.startswith("Azure: Preempt not before ")
    assert caplog.text.count("Azure's notices can't be read: TypeError") == 1


def test_the_examples_of_the_documentation_are_understood() -> None:
    stop = '{"action": "stop", "time": "2017-09-18T08:22:00Z"}'
    assert Aws(answering(200, stop)).find_notice(1505722800.0) == Notice(
        "AWS: stop at 2017-09-18T08:22:00Z", 120.0
    )
    event = {
        "EventType": "Preempt",
        "Resources": ["A"],
        "NotBefore": "Mon, 19 Sep 2016 18:29:47 GMT",
    }
    azure = Azure(
        lambda m, path, *_, **__: MetadataAnswer(200, {}, "A" if "name" in path else body)
    )
    body = json.dumps({"DocumentIncarnation": 1, "Events": [event]})
    assert azure.find_notice(1474309757.0) == Notice(
        "Azure: Preempt not before Mon, 19 Sep 2016 18:29:47 GMT", 30.0
    )
