"""The playground over a server without a model: what the form offers, and what it sends."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from browser import Page, expect, fact, generate, offered, png, ready, results
from fake_server import CAPABILITIES, EDITS, Fake, picture


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


def test_a_model_that_makes_something_else_is_not_offered(fake: Fake, tab: Callable[..., Page]) -> None:
    fake.capabilities = CAPABILITIES | {"modality": "text"}
    page = tab(fake.url)
    expect(page.locator("#notice")).to_contain_text("makes text")
    assert page.locator("#form").get_attribute("inert") is not None


def test_a_picture_with_progress_and_preview(fake: Fake, page: Page) -> None:
    fake.hold_at = 4
    page.fill("#prompt", "a valley")
    page.fill("#negative_prompt", "fog")
    page.select_option("#size", "512x768")
    page.fill("#num_inference_steps", "5")
    page.fill("#guidance_scale", "3.5")
    page.fill("#seed", "18446744073709551610")  # more than a double holds
    page.keyboard.press("Control+Enter")
    expect(page.locator("#phase")).to_have_text("Denoising: step 3 of 5")
    expect(page.locator("#elapsed")).to_contain_text("s")
    assert page.locator("#progress").evaluate("p => [p.value, p.max]") == [3, 5]
    expect(page.get_by_alt_text("Preview")).to_be_visible()
    assert page.get_by_alt_text("Preview").evaluate("i => [i.naturalWidth, i.naturalHeight]") == [512, 768]
    fake.go.set()
    expect(results(page)).to_have_count(1)
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
    assert seeds == ["5", "6", "7"]


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
    expect(page.locator("#phase")).to_contain_text("step 1")
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
    expect(edits.locator("#image-error")).to_have_text("Not a picture: no.txt")
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
