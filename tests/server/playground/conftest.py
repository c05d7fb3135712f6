"""A browser, and tabs in it; skipped where there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from browser import CHROMIUM, FLAGS, IMPATIENT, WAIT_MS, Page, ready
from fake_media import VIDEO
from fake_server import CAPABILITIES, EDITS, Fake, serving_fake


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("there is no Chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def fake_server() -> Iterator[Fake]:
    with serving_fake() as fake:
        yield fake


@pytest.fixture
def fake(fake_server: Fake) -> Fake:
    fake_server.go.clear()
    fake_server.left.clear()
    fresh = Fake(go=fake_server.go, left=fake_server.left, url=fake_server.url)
    vars(fake_server).update(vars(fresh))
    return fake_server


@pytest.fixture
def tab(chromium: Any) -> Iterator[Callable[..., Page]]:
    """Opens pages; an error in a script, or something that the policy forbids, fails the test."""
    faults: list[str] = []
    contexts = []

    def open(url: str, script: str | None = None, **options: Any) -> Page:
        context = chromium.new_context(**options)
        contexts.append(context)
        context.set_default_timeout(WAIT_MS)
        page = context.new_page()
        if script is not None:  # runs before those of the page
            page.add_init_script(script)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda line: faults.append(line.text) if "Security Policy" in line.text else None)
        page.on("request", lambda r: None if r.url.startswith((url, "blob:", "data:")) else faults.append(r.url))
        page.goto(url)
        return page

    yield open
    for context in contexts:
        context.close()
    assert faults == []


@pytest.fixture
def page(fake: Fake, tab: Callable[..., Page]) -> Page:
    return ready(tab(fake.url))


@pytest.fixture
def videos(fake: Fake, tab: Callable[..., Page]) -> Page:
    fake.capabilities = CAPABILITIES | VIDEO
    return ready(tab(fake.url, IMPATIENT))


@pytest.fixture
def edits(fake: Fake, page: Page) -> Page:
    fake.capabilities = EDITS
    page.reload()
    return ready(page)
