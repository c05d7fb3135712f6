"""What tests do on the playground's page and look for there.

playwright need not be installed; whoever uses `expect` has a page, and so has it.
"""

from __future__ import annotations

import base64
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from fake_server import picture

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)
WAIT_MS = 60_000  # on a machine that does other things too
# A page whose timers are over soon. It keeps what it would have waited, in milliseconds.
IMPATIENT = """
    window.waits = [];
    const wait = window.setTimeout;
    window.setTimeout = (act, ms, ...values) => {
        if (ms >= 1000) window.waits.push(ms);
        return wait(act, Math.min(ms, 40), ...values);
    };
"""
Page = Any  # of playwright


def expect(of: Any) -> Any:
    """Assertions that wait for what must become true."""
    from playwright.sync_api import expect as playwrights

    playwrights.set_options(timeout=WAIT_MS)
    return playwrights(of)


def ready(page: Page) -> Page:
    expect(page.locator("#status")).to_have_text("ready", timeout=WAIT_MS)
    expect(page.locator("[data-field=num_inference_steps]")).to_be_visible(timeout=WAIT_MS)
    return page


def offered(page: Page) -> set[str]:
    return {field.get_attribute("data-field") for field in page.locator(".field:visible").all()}


def results(page: Page) -> Any:
    return page.locator("#gallery li")


def fact(page: Page, name: str) -> Any:
    return page.locator(".result dl div", has=page.locator("dt", has_text=re.compile(f"^{name}$"))).locator("dd")


def png(width: int, height: int, name: str = "in.png") -> dict[str, Any]:
    return {"name": name, "mimeType": "image/png", "buffer": base64.b64decode(picture((width, height), 3))}


def generate(page: Page, prompt: str = "a valley", count: int = 1) -> None:
    page.fill("#prompt", prompt)
    page.click("#generate")
    expect(results(page)).to_have_count(count, timeout=WAIT_MS)


def copied(page: Page, click: str) -> str:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.click(click)
    expect(page.locator("#announce")).to_contain_text("Copied")
    text: str = page.evaluate("navigator.clipboard.readText()")
    return text


def execute(language: str, text: str, folder: Path) -> None:
    """Run a command that the page gave, with the key \"secret\" at hand."""
    words = {"curl": ["sh", "-euc", text], "python": [sys.executable, "-c", text]}[language]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | {"POLYMUX_API_KEY": "secret", "PATH": path}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, text + done.stderr
