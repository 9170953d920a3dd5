"""The page in Chromium, if it is installed. Pictures of it, for people, go to the folder that
PLANARIA_PICTURES names."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from planaria.bootstrap.address import Address
from planaria.node.page.app import STATIC, make_app
from planaria.node.page.http_address import listen_at
from planaria.node.page.http_server import listening
from planaria.node.page.replay import Replay
from planaria.node.run_file import RunFile, override
from tests.node.report.lines import whole

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DEADLINE = 300.0  # seconds; only a hanging test gets there
HOSTILE = "<img src=x onerror=document.title='taken'><script>document.title='taken'</script>"
STAGES, STEPS = 4, 60
RUN = override(RunFile(), model__stages=STAGES, model__vocabulary=300, steps=STEPS, name="mine")

pytestmark = pytest.mark.skipif(
    CHROMIUM is None,
    reason="there is no Chromium here to look at the page with: apt-get install it",
)


def event(time: float, node: str, kind: str, **fields: Any) -> dict[str, Any]:
    return whole({"time": time, "node": node, "kind": kind, **fields})


def run() -> Replay:
    """Return a replay in which stage 2 is lost at second 21 and rebuilt at second 24. Names and
    texts of nodes have markup and scripts."""
    events = []
    for stage in range(STAGES + 1):
        node = f"{stage}aaa{HOSTILE if stage == 1 else ''}"
        events.append(event(0.0, node, "joined", reason="wanted", host=HOSTILE, pid=stage))
        events.append(event(0.1, f"{node}/{stage}", "serving", stage=stage, device="cuda:0"))
    for step in range(1, STEPS + 1):
        at = step if step <= 20 else step + 4
        loss = 2.5 + 5.0 * 0.95**step + 0.05 * (step * 7 % 5) / 5
        events.append(event(at, "0aaa/0", "committed", step=step, loss=loss))
        for stage in range(STAGES + 1):
            node = f"{stage}{'bbb' if stage == 2 and step > 20 else 'aaa'}"
            events.append(
                event(at, f"{node}{HOSTILE if stage == 1 else ''}/{stage}", "applied", step=step)
            )
        if step % 20 == 0:
            events.append(event(at, "0aaa/0", "validated", step=step, loss=loss + 0.08))
    events += [
        event(21.0, "2aaa/2", "lost", stage=2, reason="its machine is gone"),
        event(22.0, "2bbb", "joined", reason=HOSTILE, host="vm", pid=9),
        event(22.1, "2bbb/2", "serving", stage=2, device="cuda:0"),
        event(
            *(24.0, "2bbb/2", "rebuilt"),
            **{"stall_seconds": 3.0, "stage": 2, "method": "checkfree", "step": 20, "sources": []},
            **{"bytes": 5 * 10**6, "fetch_seconds": 0.5, "rebuild_seconds": 1.5},
        ),
        event(30.0, "3aaa", "teleported", how=HOSTILE),
        event(40.0, "0aaa/0", "sampled", step=36, prompt="Once upon", text=f" a time {HOSTILE}"),
        event(64.5, "0aaa/0", "finished", step=STEPS, reason="all", validation=2.6),
    ]
    return Replay(RUN, sorted(events, key=lambda line: line["time"]), [], "mine-1", price=0.35)


@asynccontextmanager
async def served(
    replay: Replay | None = None, wrapped: Callable[[ASGIApp], ASGIApp] = lambda app: app
) -> AsyncIterator[str]:
    over = asyncio.Event()
    bound = listen_at(Address.parse("127.0.0.1:0"), "--http")
    async with listening(wrapped(make_app(replay or run(), over)), bound, over):
        yield f"http://127.0.0.1:{bound.getsockname()[1]}/"


async def browse(url: str, profile: Path, *options: str) -> str:
    """Open the page in Chromium, and return what it prints."""
    assert CHROMIUM is not None
    browser = await asyncio.create_subprocess_exec(
        *(CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
        *("--no-first-run", f"--user-data-dir={profile}", "--virtual-time-budget=5000"),
        *(*options, url),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        printed, _ = await asyncio.wait_for(browser.communicate(), DEADLINE)
    finally:
        if browser.returncode is None:
            browser.kill()
    return printed.decode()


async def test_it_shows_the_run_and_makes_no_markup_of_what_nodes_say(tmp_path: Path) -> None:
    async with served() as url:
        shown = await browse(url, tmp_path, "--dump-dom", "--window-size=1440,1500")
    assert "<title>mine · planaria</title>" in shown
    assert "all steps are committed" in shown
    assert shown.count('class="stage ') == STAGES + 1
    assert "rebuilt: stage 2 by checkfree at step 20" in shown
    assert 'class="loss"' in shown and 'class="loss smoothed"' in shown and "learning rate" in shown
    assert 'class="validation"' in shown
    assert "&lt;img src=x" in shown, "what it was to stand is not there"
    assert "<img" not in shown and shown.count("<script") == 1


@pytest.mark.parametrize(
    ("name", "at", "width"),
    [("training", 0.25, 1440), ("lost", 21.5 / 64.5, 390), ("after", 1.0, 1440)],
)
async def test_a_picture_of_it_is_not_empty(
    name: str, at: float, width: int, tmp_path: Path
) -> None:
    folder = Path(os.environ.get("PLANARIA_PICTURES", tmp_path))
    picture = folder / f"{name}-{width}.png"
    async with served() as url:
        options = f"--screenshot={picture}", f"--window-size={width},1500"
        await browse(f"{url}?at={at}", tmp_path, *options)
    assert picture.stat().st_size > 20_000, "it is as good as empty"


async def test_an_hour_has_at_most_59_minutes(tmp_path: Path) -> None:
    times = (0.0, 7190.0)
    events = [event(time, "0aaa/0", "committed", step=1, loss=5.0) for time in times]
    async with served(Replay(RUN, events, [], "mine-1")) as url:
        shown = await browse(url, tmp_path, "--dump-dom")
    assert "2 h 0 min in" in shown


async def test_the_slider_asks_again_after_an_answer_that_was_cut_off(tmp_path: Path) -> None:
    answers = 0
    script = (STATIC / "page.js").read_text()
    script += 'setInterval(() => $("moment").dispatchEvent(new Event("input")), 50);'

    def cut_once(app: ASGIApp) -> ASGIApp:
        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            nonlocal answers
            answers += scope["path"] == "/state"
            answer = app
            if scope["path"] == "/page.js":
                answer = Response(script, media_type="text/javascript")
            elif scope["path"] == "/state" and answers == 1:
                answer = Response("{", media_type="application/json")
            await answer(scope, receive, send)

        return answer

    async with served(wrapped=cut_once) as url:
        shown = await browse(url, tmp_path, "--dump-dom")
    assert "<title>mine · planaria</title>" in shown
    assert 'role="status" class="">replay</p>' in shown
