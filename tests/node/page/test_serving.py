"""Pages and figures, as they are served beside a registry, a node and a client."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from urllib.error import HTTPError

import pytest

from planaria.bootstrap.address import Address
from planaria.bootstrap.client import JoinRefused, RegistryClient
from planaria.bootstrap.registry_pb2 import Report, SeatReport
from planaria.bootstrap.rules import MembershipRules
from planaria.bootstrap.service import RegistryServer
from planaria.node.page import serving
from planaria.node.page.http_address import PageAddress, listen_at
from planaria.node.page.serving import (
    LocalPage,
    metrics_beside,
    page_beside,
    parse_state,
    serve_remote,
)
from planaria.node.report.events import Committed, event_line
from planaria.node.run_file import RunFile, override
from tests.bootstrap.conftest import serving as serving_registry

DEADLINE = 120.0  # seconds; only a hanging test gets there
RUN = override(RunFile(), model__stages=1, model__vocabulary=300, steps=50)
HERE = Address.parse("127.0.0.1:0")


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=DEADLINE) as answer:
        return str(answer.read().decode())


async def test_what_a_node_tells_is_on_its_registrys_page() -> None:
    rules = MembershipRules(run="r", stages=1, lease=0.5, start_grace=0.0)
    async with asyncio.timeout(DEADLINE), serving_registry(rules) as place:
        async with page_beside(LocalPage(place.registry, RUN, 0.5), PageAddress(HERE)):
            url = (await place.client().describe()).page
            assert url.startswith("http://127.0.0.1:")
            client = (await place.node("a", stage=0)).client
            await place.node("b", stage=1)
            client.report(Report(seats=[SeatReport(committed=3, phase="running")], bytes_in=5))
            client.tell(json.dumps(event_line(Committed(step=3, loss=6.5), "a/0", 0.0)))
            shown: dict = {}
            while not shown or not shown["loss"]["training"]:
                shown = json.loads(await asyncio.to_thread(get, f"{url}state"))
            assert shown["loss"]["training"] == [[3, 6.5]]
            assert (shown["progress"]["step"], shown["progress"]["loss"]) == (3, 6.5)
            assert shown["stages"][0]["nodes"][0]["node"] == "a"
            figures = await asyncio.to_thread(get, f"{url}metrics")
            assert 'planaria_node_receive_bytes_total{node="a",run="r"} 5.0' in figures
        assert not place.registry.page


async def test_a_registry_that_is_started_again_has_its_page_where_it_was(tmp_path) -> None:
    place = PageAddress(HERE, port_file=tmp_path / "journal.page")

    async def url() -> str:
        registry = RegistryServer(MembershipRules(run="r", stages=1), "")
        async with page_beside(LocalPage(registry, RUN), place):
            return (tmp_path / "journal.page").read_text()

    first = await url()
    assert await url() == first
    with listen_at(Address("127.0.0.1", int(first)), "--http"):
        second = await url()
        assert second != first
    assert await url() == second
    for damaged in ("", "x", "70000", "-1"):
        (tmp_path / "journal.page").write_text(damaged)
        assert 0 < int(await url()) < 65536


async def test_figures_of_a_node_are_served_where_it_says(caplog) -> None:
    caplog.set_level("INFO")

    async def figures() -> bytes:
        return b"figures\n"

    async with asyncio.timeout(DEADLINE), metrics_beside(PageAddress(HERE), figures):
        [url] = [record.args[0] for record in caplog.records if record.args]
        assert await asyncio.to_thread(get, f"{url}metrics") == "figures\n"


async def test_who_may_look_at_a_run_has_its_page_and_figures_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Browsers ask the client alone. While the registry is away, its last state stays."""
    monkeypatch.setattr(serving, "ANSWER", 0.3)
    registry = RegistryServer(MembershipRules(run="prose-1", stages=1), "")
    port = await registry.start("127.0.0.1:0")
    client, url = RegistryClient([f"127.0.0.1:{port}"]), asyncio.Queue[str]()
    with pytest.raises(JoinRefused, match=r"this registry has no page \(--http none\)"):
        await client.show()
    async with asyncio.timeout(DEADLINE):
        async with page_beside(LocalPage(registry, RUN), PageAddress(HERE)):
            watching = asyncio.create_task(serve_remote(client, PageAddress(HERE), url.put_nowait))
            here = await url.get()
            assert f":{port}/" not in here and here != registry.page
            shown = json.loads(await asyncio.to_thread(get, f"{here}state"))
            assert (shown["run"]["id"], shown["condition"]["word"]) == ("prose-1", "waiting")
            assert await asyncio.to_thread(get, here) == await asyncio.to_thread(get, registry.page)
            figures = await asyncio.to_thread(get, f"{here}metrics")
            assert 'planaria_steps{run="prose-1"} 50.0' in figures
            await registry.stop()
            while not shown["troubles"]:
                shown = json.loads(await asyncio.to_thread(get, f"{here}state"))
            assert "no answer from the registry, this is its last state" in shown["troubles"][0]
            assert shown["run"]["id"] == "prose-1"
            with pytest.raises(HTTPError, match="502"):
                await asyncio.to_thread(get, f"{here}metrics")
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    await client.close()


@pytest.mark.parametrize(
    "content", [b"", b"[]", b'{"a": NaN}', b'{"a": 1e999}', b'{"a\\"b": 1}', b"[" * 10**5, b"\xff"]
)
def test_what_a_registry_shows_is_a_pages_state_or_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match="the registry's answer can't be read"):
        parse_state(content)
