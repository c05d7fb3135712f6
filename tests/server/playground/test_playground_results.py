"""The playground over a server without a model: the gallery, and commands to take along."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from browser import Page, copied, execute, expect, generate, png, ready, results
from fake_server import Fake
from PIL import Image


def test_a_result_gives_its_settings_back(fake: Fake, page: Page) -> None:
    page.fill("#negative_prompt", "fog")
    page.select_option("#size", "256x256")
    page.fill("#num_inference_steps", "3")
    generate(page, "first")
    page.select_option("#size", "auto")
    page.fill("#negative_prompt", "")
    generate(page, "second", count=2)
    results(page).nth(1).locator("button").click()
    page.click("text=Use these settings")
    expect(page.locator("#prompt")).to_have_value("first")
    expect(page.locator("#prompt")).to_be_focused()
    generate(page, "first", count=3)
    again = {name: fake.sent[2][name] for name in fake.sent[0]}
    assert again == fake.sent[0]
    assert fake.sent[2]["seed"] == 2**64 - 9  # the one that was drawn


def test_results_can_be_looked_at_while_the_next_is_made(fake: Fake, page: Page) -> None:
    generate(page, "first")
    fake.hold_at = 2
    page.fill("#prompt", "second")
    page.click("#generate")
    expect(page.locator("#progress")).to_be_visible()
    expect(page.locator(".picture")).to_be_hidden()
    results(page).locator("button").click()
    expect(page.get_by_alt_text("Picture of: first")).to_be_visible()
    expect(page.locator("#progress")).to_be_visible()
    page.click(".result >> text=Remove")
    expect(page.locator("#progress")).to_be_visible()
    expect(page.locator(".empty")).to_be_hidden()
    fake.go.set()
    expect(page.get_by_alt_text("Picture of: second")).to_be_visible()
    expect(page.locator("#progress")).to_be_hidden()


def test_a_result_can_be_downloaded_used_again_and_removed(fake: Fake, edits: Page, tmp_path: Path) -> None:
    edits.fill("#seed", "4")
    edits.select_option("#size", "256x256")
    generate(edits)
    with edits.expect_download() as download:
        edits.click("text=Download")
    assert download.value.suggested_filename == "polymux-1-seed-4.png"
    download.value.save_as(tmp_path / "a.png")
    assert Image.open(tmp_path / "a.png").size == (256, 256)
    edits.click("text=Use as input")
    generate(edits, "again", count=2)
    assert fake.sent[1]["image"] == [("polymux-1-seed-4.png", (256, 256))]
    edits.click(".result >> text=Remove")
    expect(results(edits)).to_have_count(1)
    expect(results(edits).locator("button")).to_be_focused()
    edits.click(".result >> text=Remove")
    expect(edits.locator("#gallery")).to_be_hidden()
    expect(edits.locator(".empty")).to_be_visible()


NASTY = 'it\'s "quoted" $HOME `id` \\n; a\nnew line, @file, ünï-code 🦊 {x}'


@pytest.mark.parametrize("language", ["curl", "python"])
def test_a_command_does_what_the_page_does(fake: Fake, page: Page, language: str, tmp_path: Path) -> None:
    page.select_option("#size", "256x256")
    page.fill("#n", "2")
    page.fill("#num_inference_steps", "3")
    page.fill("#seed", str(2**64 - 5))
    generate(page, NASTY, count=2)
    text = copied(page, f"#form [data-copy={language}]")
    execute(language, text, tmp_path)
    streaming = {"stream", "stream_progress", "partial_images"}
    assert fake.sent[1] == {name: value for name, value in fake.sent[0].items() if name not in streaming}
    assert [Image.open(tmp_path / f"picture-{i}.png").size for i in range(2)] == [(256, 256)] * 2
    results(page).nth(1).locator("button").click()
    of_one = copied(page, f".result >> text=Copy as {'curl' if language == 'curl' else 'Python'}")
    execute(language, of_one, tmp_path)
    assert fake.sent[2] == {name: value for name, value in fake.sent[1].items() if name != "n"} | {"seed": 2**64 - 4}


@pytest.mark.parametrize(("language", "count"), [("curl", 1), ("curl", 2), ("python", 2)])
def test_a_command_with_pictures(fake: Fake, edits: Page, language: str, count: int, tmp_path: Path) -> None:
    fake.api_key = "secret"
    edits.evaluate("sessionStorage.setItem('polymux-api-key', 'secret')")
    files = [png(48, 32, 'a "b"; c\'s,.png'), png(16, 16, "two.png")][:count]
    mask = png(48, 32, "mask.png")
    for file in (*files, mask):
        (tmp_path / file["name"]).write_bytes(file["buffer"])
    edits.set_input_files("#image", files)
    edits.set_input_files("#mask", [mask])
    edits.fill("#seed", "3")
    generate(edits, NASTY.replace("\n", " "))  # forms know other ends of lines
    text = copied(edits, f"#form [data-copy={language}]")
    assert "secret" not in text
    execute(language, text, tmp_path)
    streaming = {"stream", "stream_progress", "partial_images"}
    assert fake.sent[1] == {name: value for name, value in fake.sent[0].items() if name not in streaming}


def test_a_command_says_what_the_server_refuses(fake: Fake, page: Page, tmp_path: Path) -> None:
    page.fill("#prompt", "a")
    text = copied(page, "#form [data-copy=curl]")
    fake.error = (400, {"message": "the size is odd"})
    with pytest.raises(AssertionError, match="the size is odd"):
        execute("curl", text, tmp_path)


def test_without_a_clipboard_the_command_is_shown(fake: Fake, tab: Callable[..., Page]) -> None:
    page = ready(tab(fake.url))
    page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")  # as over plain http
    page.fill("#prompt", "a")
    page.click("#form [data-copy=curl]")
    expect(page.locator("#snippet textarea")).to_be_visible()
    assert page.locator("#snippet textarea").input_value().startswith("curl ")
