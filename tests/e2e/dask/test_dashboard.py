"""Dask's dashboard as a user meets it: in a browser."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from distributed import Client
from tornado.websocket import WebSocketClientConnection, websocket_connect

import skyward as sky
from skyward.base.waiting import NotYet, wait_until
from skyward_dask import SkywardCluster

CHROMIUM = shutil.which("chromium")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--remote-debugging-port=0",
    "--window-size=1400,900",
]
DEADLINE_S = 60.0
TASKS = 24
WORKERS = 2
SHOWN = """
(() => {
  const documents = window.Bokeh ? Bokeh.documents : [];
  if (documents.length != 1 || !documents[0].is_idle) return null;
  const rows = name => documents[0].get_model_by_name(name).renderers[0].data_source.get_length();
  return {title: document.title, workers: rows("processing"), tasks: rows("task_stream")};
})()
"""

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")


class Page:
    """A browser's one tab, driven over the DevTools protocol."""

    def __init__(self, socket: WebSocketClientConnection) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self._session: dict[str, str] = {}
        self.statuses: list[int] = []
        """Of the documents that were opened, in order."""

    async def end(self) -> None:
        """End the browser."""
        self._session = {}
        await self.call("Browser.close")

    async def open(self) -> None:
        target = await self.call("Target.createTarget", url="about:blank")
        attached = await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        await self.call("Network.enable")
        await self.call("Page.enable")

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        this = next(self._ids)
        await self._socket.write_message(json.dumps({"id": this, "method": method, "params": params, **self._session}))
        async with asyncio.timeout(DEADLINE_S):
            while True:
                said = await self._socket.read_message()
                assert said is not None, "the browser has ended"
                message = json.loads(said)
                if message.get("method") == "Network.responseReceived" and message["params"]["type"] == "Document":
                    self.statuses.append(message["params"]["response"]["status"])
                if message.get("id") == this:
                    assert "error" not in message, message
                    return message["result"]

    async def evaluate(self, expression: str) -> Any:
        answer = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        return answer["result"].get("value")

    async def click(self, what: str) -> None:
        """Click on the first such element, once the page has it."""
        click = f"(() => {{ const it = document.querySelector('{what}'); it?.click(); return !!it; }})()"

        async def probe() -> bool | None:
            return await self.evaluate(click) or None

        await wait_until(probe, deadline_s=DEADLINE_S, interval_s=0.05, what=f"{what} to be on the page")

    async def shows(self, *, tasks: int) -> dict[str, Any]:
        """What is on Dask's page, once it is drawn and its websocket has brought all workers and so many tasks."""

        async def probe() -> dict[str, Any] | NotYet:
            shown = await self.evaluate(SHOWN)
            complete = shown and shown["workers"] == WORKERS and shown["tasks"] >= tasks
            return shown if complete else NotYet(f"{shown} at {await self.evaluate('location.href')}")

        return await wait_until(probe, deadline_s=DEADLINE_S, interval_s=0.1, what="Dask's page to be drawn")

    async def answers(self, count: int) -> list[int]:
        """The statuses of the documents that were opened, once there are so many."""

        async def probe() -> list[int] | None:
            await self.evaluate("0")  # what the browser tells meanwhile is read with the answer
            return self.statuses if len(self.statuses) >= count else None

        return await wait_until(probe, deadline_s=DEADLINE_S, interval_s=0.1, what=f"{count} documents")

    async def picture(self) -> bytes:
        return base64.b64decode((await self.call("Page.captureScreenshot", format="png"))["data"])


@asynccontextmanager
async def browser() -> AsyncIterator[Page]:
    # Not pytest's folder, as the name of Chromium's socket must be short.
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as folder:
        async with browser_in(folder) as page:
            yield page


@asynccontextmanager
async def browser_in(folder: str) -> AsyncIterator[Page]:
    assert CHROMIUM is not None
    process = await asyncio.create_subprocess_exec(
        CHROMIUM,
        *FLAGS,
        f"--user-data-dir={folder}",
        env={**os.environ, "HOME": folder, "TMPDIR": folder},
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    said: list[bytes] = []
    try:
        async with asyncio.timeout(DEADLINE_S):
            while b"DevTools listening on " not in (line := await process.stderr.readline()):
                assert line, f"Chromium ended before it listened: {said}"
                said.append(line)
        async with connected(line.decode().split()[-1]) as page:
            yield page
            await page.end()
        await asyncio.wait_for(process.communicate(), DEADLINE_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[Page]:
    socket = await websocket_connect(address, max_message_size=64 << 20)
    try:
        page = Page(socket)
        await page.open()
        yield page
    finally:
        socket.close()


@pytest.fixture(scope="module")
def cluster() -> Iterator[SkywardCluster]:
    with SkywardCluster(provider=sky.Local(), nodes=1, concurrency=WORKERS, display="quiet") as cluster:
        yield cluster


@pytest.fixture
def link(cluster: SkywardCluster) -> str:
    link = cluster.get_dashboard_link()  # which says why, if there is none
    assert cluster.dashboard_link == link
    return link


def work(cluster: SkywardCluster) -> None:
    def slow(x: int) -> int:
        time.sleep(0.01)
        return x

    with Client(cluster) as client:
        assert client.gather(client.map(slow, range(TASKS), pure=False)) == list(range(TASKS))


@pytest.mark.full
async def test_the_link_shows_the_clusters_work(cluster: SkywardCluster, link: str, tmp_path: Path) -> None:
    async with browser() as page:
        await page.call("Page.navigate", url=link)
        before = await page.shows(tasks=0)
        await asyncio.to_thread(work, cluster)  # what follows comes through the websocket
        await page.shows(tasks=TASKS)
        address, cookies = await page.evaluate("location.href"), await page.evaluate("document.cookie")
        (tmp_path / "dashboard.png").write_bytes(await page.picture())  # to be looked at, if this fails

    assert before["title"] == "Dask: Status"
    assert before["tasks"] < TASKS
    assert page.statuses == [200]
    assert address == link.partition("?")[0]
    assert cookies == ""  # scripts cannot read it


# In `make test`: unit/node/supervisor/test_dashboard.py.
@pytest.mark.full
async def test_without_the_token_nothing_is_shown(link: str) -> None:
    async with browser() as page:
        await page.call("Page.navigate", url=link.partition("?")[0])
        assert await page.answers(1) == [401]
        await page.call("Page.navigate", url=link + "x")
        assert await page.answers(2) == [401, 401]
        assert await page.evaluate("typeof Bokeh") == "undefined"


@pytest.mark.full
async def test_the_token_is_the_password(link: str) -> None:
    where, _, query = link.partition("?")
    _, _, token = query.partition("=")
    async with browser() as page:
        await page.call("Page.navigate", url=where.replace("http://", f"http://me:{token}@"))
        await page.shows(tasks=0)


@pytest.mark.full
async def test_the_link_works_from_another_sites_page(link: str) -> None:
    async with browser() as page:
        await page.call("Page.navigate", url="data:text/html," + quote(f"<a href='{link}'>see</a>"))
        await page.click("a")
        await page.shows(tasks=0)

    assert page.statuses == [200, 200, 200]  # that page, the gate's, Dask's
