"""What the page's app serves over HTTP, and to which clients."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from typing import Any

import pytest
from starlette.testclient import TestClient

from planaria.bootstrap.address import Address
from planaria.bootstrap.credentials import CredentialsError
from planaria.node.page import app as page_app
from planaria.node.page.app import STATIC, CachedState, make_app
from planaria.node.page.http_address import PageAddress, TlsFiles


class Shown:
    """A state to show, of which one part changes each time."""

    def __init__(self, span: tuple[float, float] | None = None) -> None:
        self.span = span
        self.step = 0

    def now(self) -> dict[str, Any]:
        self.step += 1
        return {"run": {"name": "<b>"}, "progress": {"step": self.step}}

    def at(self, moment: float) -> dict[str, Any]:
        return {"progress": {"at": moment}}


def client(shown: Shown, token: str = "", local: bool = True) -> TestClient:
    app = make_app(shown, asyncio.Event(), token, local)
    return TestClient(app, base_url="http://127.0.0.1")


def test_the_page_and_all_it_needs_come_from_here() -> None:
    browser = client(Shown())
    page = browser.get("/")
    assert page.headers["content-type"].startswith("text/html")
    needed = re.findall(r'(?:src|href)="(?!data:)([^"]+)"', page.text)
    assert sorted(needed) == ["page.css", "page.js"]
    for name in needed:
        assert browser.get(f"/{name}").status_code == 200
    assert "http://" not in page.text.replace("http://www.w3.org/2000/svg", "")


def test_what_nodes_say_is_never_made_markup() -> None:
    script = (STATIC / "page.js").read_text()
    for way in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "DOMParser", "eval("):
        assert way not in script


def test_the_state_is_made_once_for_all_who_ask() -> None:
    shown = Shown()
    with client(shown) as browser:
        first, second = (browser.get("/state").json() for _ in range(2))
    assert first == second == {"run": {"name": "<b>"}, "progress": {"step": 1}}
    assert browser.get("/span").json() is None


def test_a_run_that_is_over_is_shown_at_any_moment_of_it() -> None:
    browser = client(Shown((10.0, 20.0)))
    assert browser.get("/span").json() == [10.0, 20.0]
    assert browser.get("/state?at=12.5").json() == {"progress": {"at": 12.5}}
    for wrong in ("9", "nan", "inf", "soon"):
        answer = browser.get(f"/state?at={wrong}")
        assert answer.status_code == 400 and "at=" in answer.text


def basic(token: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"me:{token}".encode()).decode()}


def test_who_does_not_show_the_token_is_refused() -> None:
    browser = client(Shown(), token="secret", local=False)
    for shown in ({}, basic("other"), basic(""), {"Authorization": "Basic !"}):
        for path in ("/", "/state", "/events", "/page.js", "/nowhere"):
            answer = browser.get(path, headers=shown)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"].startswith("Basic")
    assert browser.get("/", headers=basic("secret")).status_code == 200
    assert browser.get("/", headers={"Authorization": "Bearer secret"}).status_code == 200


def test_a_page_for_this_machine_is_asked_for_by_its_names_only() -> None:
    """A website could otherwise read the page by a name of its own that leads to this machine."""
    browser = client(Shown())
    assert browser.get("/", headers={"Host": "localhost:8000"}).status_code == 200
    assert browser.get("/", headers={"Host": "evil.example"}).status_code == 400
    assert client(Shown(), local=False).get("/", headers={"Host": "x.example"}).status_code == 200


@pytest.mark.parametrize(
    ("place", "fine"),
    [
        (PageAddress(Address.parse("127.0.0.1:0")), True),
        (PageAddress(Address.parse("0.0.0.0:0")), False),
        (PageAddress(Address.parse("0.0.0.0:0"), token="t"), False),
        (PageAddress(Address.parse("0.0.0.0:0"), insecure=True), True),
        (PageAddress(Address.parse("0.0.0.0:0"), "t", TlsFiles("c", "k")), True),  # type: ignore[arg-type]
    ],
)
def test_beyond_this_machine_a_page_wants_token_and_tls(place: PageAddress, fine: bool) -> None:
    if fine:
        place.check()
    else:
        with pytest.raises(CredentialsError, match="--insecure"):
            place.check()


async def test_who_watches_gets_all_at_first_and_then_what_has_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(page_app, "REFRESH", 0.0)
    over = asyncio.Event()
    changes = page_app._changes(CachedState(Shown(), asyncio.get_running_loop().time), over)
    states = [json.loads((await anext(changes)).removeprefix("data: ")) for _ in range(2)]
    assert states[0] == {"run": {"name": "<b>"}, "progress": {"step": 1}}
    assert [*states[1]] == ["progress"]
    over.set()
    assert [change async for change in changes] == []
