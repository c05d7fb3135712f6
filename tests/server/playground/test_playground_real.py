"""The playground over a real server: what its page and its commands do there."""

from __future__ import annotations

from collections.abc import Callable

from browser import Page, expect, fact, generate, offered, ready, results
from server_process import Server, until

COUNT_PREVIEWS = """() => {
    window.previews = 0;
    const count = () => (window.previews += document.querySelectorAll(".frame .preview").length);
    new MutationObserver(count).observe(document.querySelector(".frame"), { childList: true, subtree: true });
}"""


def test_generate_cancel_and_fail(server: Server, tab: Callable[..., Page]) -> None:
    page = ready(tab(server.url))
    assert {"negative_prompt", "true_cfg_scale", "size"} <= offered(page)
    assert "guidance_scale" not in offered(page)  # this checkpoint would ignore it
    page.select_option("#size", "custom")
    page.fill("#width", "96")
    page.fill("#height", "64")
    page.fill("#num_inference_steps", "8")
    page.fill("#seed", "5")
    page.evaluate(COUNT_PREVIEWS)
    generate(page, "a red circle")
    assert page.locator(".picture").evaluate("i => [i.naturalWidth, i.naturalHeight]") == [96, 64]
    expect(fact(page, "Seed")).to_have_text("5")
    assert page.evaluate("window.previews") >= 1

    before = server.outcomes()["aborted"]
    page.fill("#num_inference_steps", "100000")
    page.click("#generate")
    expect(page.locator("#phase")).to_contain_text("of 100000")
    page.keyboard.press("Escape")
    until(lambda: server.outcomes()["aborted"] == before + 1)

    page.fill("#num_inference_steps", "0")
    page.click("#generate")
    expect(page.locator("#num_inference_steps-error")).to_contain_text("Must be from 2 to 200000")
    page.fill("#num_inference_steps", "2")
    page.fill("#width", "95")
    page.click("#generate")
    expect(page.locator("#size-error")).to_contain_text("multiple of 16")
    expect(results(page)).to_have_count(1)
