"""The playground over a server without a model: errors, keys, small screens, the keyboard."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from browser import Page, expect, generate, png, ready
from fake_server import EDITS, Fake


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
