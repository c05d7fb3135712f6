"""The playground in headless Chromium, over a server without a model."""

from __future__ import annotations

import base64
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from playground_server import CAPABILITIES, EDITS, Fake, picture, serving_fake

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)
WAIT_MS = 20_000
expect = playwright.expect
NASTY = 'it\'s "quoted" $HOME `id` \\n; a\nnew line, @file, ünï-code 🦊 {x}'
Page = Any  # of playwright, which need not be there


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
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

    def open(url: str, **options: Any) -> Page:
        context = chromium.new_context(**options)
        contexts.append(context)
        context.set_default_timeout(WAIT_MS)
        page = context.new_page()
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


# What is offered


def test_only_what_the_model_takes_is_offered(fake: Fake, page: Page) -> None:
    assert offered(page) == {"prompt", "negative_prompt", "size", "num_inference_steps", "n", "seed", "guidance_scale"}
    assert fake.capabilities is not None
    fake.capabilities |= {"fields": ["num_inference_steps", "true_cfg_scale"]}
    page.reload()
    ready(page)
    assert offered(page) == {"prompt", "num_inference_steps", "n", "seed", "true_cfg_scale"}


def test_what_acts_on_a_picture_is_offered_when_there_is_one(fake: Fake, page: Page) -> None:
    fake.capabilities = EDITS
    page.reload()
    ready(page)
    assert offered(page) & {"image", "mask", "strength"} == {"image"}
    page.set_input_files("#image", [png(32, 32)])
    assert offered(page) & {"image", "mask", "strength"} == {"image", "mask", "strength"}
    page.click("button[aria-label='Remove in.png']")
    assert offered(page) & {"image", "mask", "strength"} == {"image"}


def test_sizes_are_those_that_the_model_makes(fake: Fake, page: Page) -> None:
    sizes = page.locator("#size option").evaluate_all("options => options.map(o => o.value)")
    assert {"auto", "custom", "256x256", "1024x1024"} <= set(sizes)
    assert "1344x768" in sizes  # the server allows 1024 * 1024 pixels
    assert fake.capabilities is not None
    fake.capabilities |= {"size_multiple": 256}
    page.reload()
    ready(page)
    sizes = page.locator("#size option").evaluate_all("options => options.map(o => o.value)")
    squares = {"256x256", "512x512", "768x768", "1024x1024"}
    assert set(sizes) == {"auto", "custom", "768x512", "1024x768", "512x768", "768x1024"} | squares


def test_the_model_and_its_limits_are_told(page: Page) -> None:
    expect(page.locator("#model-name")).to_have_text("fake-model")
    page.click("#about summary")
    facts = page.locator("#facts")
    for words in (
        "FakePipeline",
        "123,456",
        "multiples of 16",
        "up to 1,048,576 pixels",
        "this checkpoint is distilled",
    ):
        expect(facts).to_contain_text(words)


def test_loading_then_ready(fake: Fake, tab: Callable[..., Page]) -> None:
    capabilities, fake.capabilities, fake.status = fake.capabilities, None, "loading"
    page = tab(fake.url)
    expect(page.locator("#status")).to_have_text("loading")
    page.fill("#prompt", "typed early")
    page.click("#generate")
    expect(page.locator("#alert")).to_contain_text("not loaded yet")
    fake.capabilities, fake.status = capabilities, "ready"
    ready(page)
    expect(page.locator("#prompt")).to_have_value("typed early")


def test_a_model_that_sleeps_can_be_woken(fake: Fake, tab: Callable[..., Page]) -> None:
    fake.status = "asleep"
    page = tab(fake.url)
    page.click("#wake")
    ready(page)
    expect(page.locator("#wake")).to_be_hidden()


def test_a_model_that_makes_no_pictures_is_not_offered(fake: Fake, tab: Callable[..., Page]) -> None:
    fake.capabilities = CAPABILITIES | {"modality": "video"}
    page = tab(fake.url)
    expect(page.locator("#notice")).to_contain_text("makes video")
    assert page.locator("#form").get_attribute("inert") is not None


# Generating


def test_a_picture_with_progress_and_preview(fake: Fake, page: Page) -> None:
    fake.hold_at = 4
    page.fill("#prompt", "a valley")
    page.fill("#negative_prompt", "fog")
    page.select_option("#size", "512x768")
    page.fill("#num_inference_steps", "5")
    page.fill("#guidance_scale", "3.5")
    page.fill("#seed", "18446744073709551610")  # more than a double holds
    page.keyboard.press("Control+Enter")
    expect(page.locator("#phase")).to_have_text("Denoising: step 3 of 5", timeout=WAIT_MS)
    expect(page.locator("#elapsed")).to_contain_text("s")
    assert page.locator("#progress").evaluate("p => [p.value, p.max]") == [3, 5]
    expect(page.get_by_alt_text("Preview")).to_be_visible()
    assert page.get_by_alt_text("Preview").evaluate("i => [i.naturalWidth, i.naturalHeight]") == [512, 768]
    fake.go.set()
    expect(results(page)).to_have_count(1, timeout=WAIT_MS)
    assert page.locator(".picture").evaluate("i => [i.naturalWidth, i.naturalHeight]") == [512, 768]
    expect(fact(page, "Seed")).to_have_text("18446744073709551610")
    expect(fact(page, "Guidance")).to_have_text("3.5")
    assert fake.sent == [
        {
            "model": "fake-model",
            "prompt": "a valley",
            "negative_prompt": "fog",
            "size": "512x768",
            "num_inference_steps": 5,
            "guidance_scale": 3.5,
            "seed": 18446744073709551610,
            "stream": True,
            "stream_progress": True,
            "partial_images": 3,
        }
    ]


def test_what_is_left_to_the_model_is_not_sent(fake: Fake, page: Page) -> None:
    generate(page)
    assert fake.sent[0].keys() == {"model", "prompt", "stream", "stream_progress", "partial_images"}


def test_each_picture_of_several_has_its_own_seed(fake: Fake, page: Page) -> None:
    page.fill("#n", "3")
    page.fill("#seed", "5")
    generate(page, count=3)
    seeds = []
    for item in results(page).all():
        item.locator("button").click()
        seeds.append(fact(page, "Seed").inner_text())
    assert seeds == ["7", "6", "5"]  # newest first


def test_layers_are_made_again_together(fake: Fake, page: Page) -> None:
    fake.layers = True
    page.fill("#n", "2")
    page.fill("#seed", "5")
    generate(page, count=2)
    expect(fact(page, "Seed")).to_have_text("5")
    page.click("text=Use these settings")
    generate(page, count=4)
    assert fake.sent[1] == fake.sent[0]


def test_a_model_without_previews_is_not_asked_for_any(fake: Fake, page: Page) -> None:
    assert fake.capabilities is not None
    fake.capabilities |= {"previews": False}
    page.reload()
    generate(ready(page))
    assert "partial_images" not in fake.sent[0]


def test_if_previews_are_refused_there_are_none(fake: Fake, page: Page) -> None:
    fake.error = (400, {"message": "partial_images=3: this model makes none", "param": "partial_images"})
    generate(page)
    assert [body.get("partial_images") for body in fake.sent] == [3, None]


@pytest.mark.parametrize("how", ["Escape", "button"])
def test_cancel(fake: Fake, page: Page, how: str) -> None:
    fake.hold_at = 2
    page.fill("#prompt", "a valley")
    page.keyboard.press("Meta+Enter")
    expect(page.locator("#phase")).to_contain_text("step 1", timeout=WAIT_MS)
    page.keyboard.press("Escape") if how == "Escape" else page.click("#cancel")
    expect(page.locator("#announce")).to_have_text("Cancelled")
    expect(page.locator("#cancel")).to_be_hidden()
    assert fake.left.wait(20)
    fake.go.set()
    generate(page)  # the next one works


def test_custom_size(fake: Fake, page: Page) -> None:
    page.select_option("#size", "custom")
    page.fill("#prompt", "a")
    page.fill("#width", "320")
    page.click("#generate")
    expect(page.locator("#size-error")).to_contain_text("both width and height")
    page.fill("#height", "64")
    generate(page)
    assert fake.sent[0]["size"] == "320x64"


# Pictures as input


@pytest.fixture
def edits(fake: Fake, page: Page) -> Page:
    fake.capabilities = EDITS
    page.reload()
    return ready(page)


def test_pictures_and_mask_are_uploaded(fake: Fake, edits: Page) -> None:
    edits.set_input_files("#image", [png(48, 32, "one.png"), png(16, 16, "two.png")])
    expect(edits.locator("[data-field=image] .chosen img")).to_have_count(2)
    edits.set_input_files("#mask", [png(48, 32, "mask.png")])
    edits.fill("#strength", "0.5")
    edits.fill("#seed", "9")
    generate(edits, "more snow")
    assert fake.sent == [
        {
            "model": "fake-model",
            "prompt": "more snow",
            "strength": "0.5",
            "seed": 9,
            "image[]": [("one.png", (48, 32)), ("two.png", (16, 16))],
            "mask": [("mask.png", (48, 32))],
            "stream": True,
            "stream_progress": True,
            "partial_images": 3,
        }
    ]


@pytest.mark.parametrize("how", ["drop", "paste"])
def test_pictures_can_be_dropped_and_pasted(fake: Fake, edits: Page, how: str) -> None:
    event = {"drop": ("DragEvent", "dataTransfer"), "paste": ("ClipboardEvent", "clipboardData")}[how]
    edits.evaluate(
        """([data, type, [constructor, key]]) => {
            const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
            const transfer = new DataTransfer();
            transfer.items.add(new File([bytes], "given.png", { type: "image/png" }));
            transfer.items.add(new File(["text"], "no.txt", { type: "text/plain" }));
            const event = new window[constructor](type, { [key]: transfer, bubbles: true, cancelable: true });
            document.querySelector("main").dispatchEvent(event);
        }""",
        [picture((40, 24), 1), how, event],
    )
    expect(edits.get_by_alt_text("given.png")).to_be_visible()
    generate(edits, "x")
    assert fake.sent[0]["image"] == [("given.png", (40, 24))]


def test_a_picture_that_is_needed_is_asked_for(fake: Fake, edits: Page) -> None:
    fake.capabilities = EDITS | {"required": ["prompt", "image"], "media": {"image": 1}}
    edits.reload()
    ready(edits)
    edits.fill("#prompt", "x")
    edits.click("#generate")
    expect(edits.locator("#image-error")).to_contain_text("needs one")
    assert fake.sent == []


# Gallery


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


# What goes wrong


def test_an_error_stands_beside_its_field(fake: Fake, page: Page) -> None:
    message = "num_inference_steps=999: must be from 1 to 100 (--max-inference-steps)"
    fake.error = (400, {"message": message, "param": "num_inference_steps"})
    page.fill("#prompt", "a")
    page.fill("#num_inference_steps", "999")
    page.click("#generate")
    steps = page.locator("#num_inference_steps")
    expect(page.locator("#num_inference_steps-error")).to_have_text("Must be from 1 to 100 (--max-inference-steps)")
    expect(steps).to_have_attribute("aria-invalid", "true")
    expect(steps).to_have_accessible_description("Must be from 1 to 100 (--max-inference-steps)")
    expect(steps).to_be_focused()
    page.fill("#num_inference_steps", "9")
    expect(page.locator("#num_inference_steps-error")).to_have_count(0)
    assert steps.get_attribute("aria-invalid") is None


@pytest.mark.parametrize(
    ("param", "field"), [("width", "size"), ("image.1", "image"), ("image[]", "image"), ("mask_image", "mask")]
)
def test_errors_of_parts_stand_beside_the_whole(fake: Fake, edits: Page, param: str, field: str) -> None:
    edits.set_input_files("#image", [png(32, 32)])
    edits.fill("#prompt", "a")
    fake.error = (400, {"message": "it is wrong", "param": param})
    edits.click("#generate")
    expect(edits.locator(f"#{field}-error")).to_have_text("It is wrong")


@pytest.mark.parametrize("param", [None, "unknown", "guidance_scale_2", "a b\"]'"])
def test_other_errors_are_told_at_the_button(fake: Fake, page: Page, param: str | None) -> None:
    fake.error = (429, {"message": "too many requests", "param": param})
    page.fill("#prompt", "a")
    page.click("#generate")
    expect(page.get_by_role("alert").filter(has_text="too many")).to_have_text("too many requests. Try again in 7 s.")


def test_an_error_in_the_middle_of_a_stream(fake: Fake, page: Page) -> None:
    fake.late_error = {"message": "<b>out of memory</b>"}
    page.fill("#prompt", "a")
    page.click("#generate")
    expect(page.locator("#alert")).to_have_text("<b>out of memory</b>")
    generate(page)
    expect(page.locator("#alert")).to_be_empty()


def test_a_server_with_keys(fake: Fake, tab: Callable[..., Page]) -> None:
    fake.api_key = "secret"
    page = tab(fake.url)
    for given in ("wrong", "secret"):
        expect(page.locator("#api-key")).to_be_focused()
        page.fill("#api-key", given)
        page.keyboard.press("Enter")
        if given == "wrong":
            expect(page.locator("#key-error")).to_contain_text("did not accept")
    ready(page)
    expect(page.locator("#key-form")).to_be_hidden()
    generate(page)
    assert page.evaluate("[Object.values(sessionStorage), localStorage.length]") == [["secret"], 0]


# Commands to take along


def copied(page: Page, click: str) -> str:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.click(click)
    expect(page.locator("#announce")).to_contain_text("Copied")
    text: str = page.evaluate("navigator.clipboard.readText()")
    return text


def execute(language: str, text: str, folder: Path) -> None:
    words = {"curl": ["sh", "-euc", text], "python": [sys.executable, "-c", text]}[language]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | {"POLYMUX_API_KEY": "secret", "PATH": path}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, text + done.stderr


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


# Looks and use


@pytest.mark.parametrize("width", [360, 1280])
def test_nothing_is_wider_than_the_screen(fake: Fake, tab: Callable[..., Page], width: int) -> None:
    fake.capabilities = EDITS
    page = ready(tab(fake.url, viewport={"width": width, "height": 700}))
    page.set_input_files("#image", [png(640, 64, "a-very-long-name" * 8 + ".png")])
    page.fill("#n", "4")
    generate(page, "x" * 400, count=4)
    page.click("#about summary")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    box = page.locator("#about .panel").bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= width
    generate_box = page.locator("#generate").bounding_box()
    assert generate_box["y"] + generate_box["height"] <= 700  # at hand wherever one has scrolled to


def test_the_keyboard_reaches_everything(fake: Fake, edits: Page) -> None:
    generate(edits)
    edits.locator(".skip").focus()
    reached = ["Skip to the prompt"]
    for _ in range(40):
        edits.keyboard.press("Tab")
        name = edits.evaluate("(e => e.id || e.ariaLabel || e.textContent.trim())(document.activeElement)")
        if name == reached[0]:
            break
        reached.append(name)
    assert reached[:3] == ["Skip to the prompt", "fake-modelready", "prompt"]
    wanted = ["image", "size", "num_inference_steps", "n", "seed", "random-seed", "generate", "Use these settings"]
    assert [name for name in reached if name in wanted] == wanted
    assert reached.index("Remove") < reached.index("Result 1: a valley")
    edits.keyboard.press("Tab")
    shown = edits.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert shown == "solid"


def test_no_motion_where_none_is_wanted(fake: Fake, tab: Callable[..., Page]) -> None:
    page = ready(tab(fake.url, reduced_motion="reduce"))
    fake.hold_at = 1
    page.fill("#prompt", "a")
    page.click("#generate")
    expect(page.locator(".tile")).to_be_visible()
    assert page.evaluate("document.getAnimations().length") == 0
    page.click("#cancel")
