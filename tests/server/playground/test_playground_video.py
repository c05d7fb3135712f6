"""The playground over a server without a model: videos, which are jobs that the server keeps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from browser import IMPATIENT, Page, copied, execute, expect, fact, generate, offered, png, ready, results
from fake_media import ANIMATE, VIDEO, add_video, video_file
from fake_server import CAPABILITIES, Fake
from fastapi.responses import JSONResponse, Response
from server_process import until

PLAYS = "v => v.readyState >= 2 && [v.videoWidth, v.videoHeight]"


def test_only_what_the_model_takes_is_offered(fake: Fake, videos: Page) -> None:
    common = {"prompt", "negative_prompt", "num_inference_steps", "seed", "guidance_scale", "fps", "output_format"}
    assert offered(videos) == common | {"size", "seconds", "num_frames"}
    sizes = videos.locator("#size option").evaluate_all("options => options.map(o => o.value)")
    assert {"auto", "832x480", "1280x720", "custom"} <= set(sizes)
    videos.click("#about summary")
    expect(videos.locator("#facts")).to_contain_text("up to 1,024")
    fake.capabilities = CAPABILITIES | VIDEO | {"fields": ["num_inference_steps"]}
    videos.reload()
    assert offered(ready(videos)) == {"prompt", "num_inference_steps", "seed", "fps", "output_format"}
    fake.capabilities = CAPABILITIES | ANIMATE
    videos.reload()
    media = {"image", "last_image", "reference_images", "video"}
    assert offered(ready(videos)) == common | {"size", "seconds", "num_frames"} | media
    videos.set_input_files("#last_image", [png(32, 32)])
    expect(videos.locator("[data-field=strength]")).to_be_visible()


def test_a_job_with_progress_and_its_video(fake: Fake, tab: Callable[..., Page]) -> None:
    fake.api_key = "secret"
    fake.capabilities = CAPABILITIES | VIDEO
    videos = tab(fake.url, IMPATIENT)
    videos.fill("#api-key", "secret")
    videos.keyboard.press("Enter")
    ready(videos)
    fake.hold_at = 40
    videos.fill("#prompt", "waves")
    videos.fill("#negative_prompt", "rain")
    videos.select_option("#size", "480x320")
    videos.fill("#seconds", "0.8")
    videos.fill("#fps", "10")
    videos.fill("#num_inference_steps", "5")
    videos.fill("#guidance_scale", "3.5")
    videos.fill("#seed", "18446744073709551610")
    videos.keyboard.press("Control+Enter")
    expect(videos.locator("#phase")).to_have_text("Denoising: 40 %")
    assert videos.locator("#progress").evaluate("p => [p.value, p.max]") == [40, 100]
    expect(videos.locator("#generate")).to_have_attribute("aria-disabled", "true")
    fake.go.set()
    expect(results(videos)).to_have_count(1)
    expect(videos.locator("#announce")).to_have_text("The video is ready")
    shown = videos.get_by_label("Video of: waves")
    until(lambda: shown.evaluate(PLAYS) == [480, 320], 20)
    until(lambda: shown.evaluate("v => v.currentTime") > 0, 20)  # it plays, without sound
    assert shown.evaluate("v => v.muted")
    for name, value in {
        "Negative prompt": "rain",
        "Steps": "5",
        "Size": "480 × 320",
        "Length": "0.9 s: 9 frames, 10 per second",
        "Seed": "18446744073709551610",
        "Took": "12 s",
    }.items():
        expect(fact(videos, name)).to_have_text(value)
    assert fake.sent == [
        {
            "model": "fake-model",
            "prompt": "waves",
            "negative_prompt": "rain",
            "size": "480x320",
            "seconds": 0.8,
            "fps": 10,
            "num_inference_steps": 5,
            "guidance_scale": 3.5,
            "seed": 18446744073709551610,
        }
    ]
    until(lambda: results(videos).locator("video").evaluate(PLAYS) == [480, 320], 20)


def test_what_is_left_to_the_model_is_not_sent(fake: Fake, videos: Page) -> None:
    generate(videos)
    assert fake.sent == [{"model": "fake-model", "prompt": "a valley"}]


def test_a_length_is_said_once(fake: Fake, videos: Page) -> None:
    videos.fill("#seconds", "2")
    videos.fill("#num_frames", "9")
    expect(videos.locator("#seconds")).to_have_value("")
    expect(videos.locator("#num_frames")).to_have_accessible_description("1 more than a multiple of\u00a04")
    generate(videos)
    assert fake.sent == [{"model": "fake-model", "prompt": "a valley", "num_frames": 9}]
    videos.fill("#num_frames", "9.5")
    videos.click("#generate")
    expect(videos.locator("#num_frames-error")).to_have_text("A whole number.")


def test_frames_between_frames(fake: Fake, videos: Page, tmp_path: Path) -> None:
    assert "frame_interpolation_exp" not in offered(videos)
    fake.capabilities = CAPABILITIES | VIDEO | {"frame_interpolation": True}
    videos.reload()
    ready(videos)
    videos.select_option("#frame_interpolation_exp", label="3")
    generate(videos)
    wanted = {"model": "fake-model", "prompt": "a valley", "enable_frame_interpolation": True}
    assert fake.sent == [wanted | {"frame_interpolation_exp": 2}]
    expect(fact(videos, "In between")).to_have_text("3 frames")
    execute("python", copied(videos, ".result >> text=Copy as Python"), tmp_path)
    assert fake.sent[1] == fake.sent[0] | {"seed": 2**64 - 9}
    videos.select_option("#frame_interpolation_exp", "")
    videos.click("text=Use these settings")
    expect(videos.locator("#frame_interpolation_exp")).to_have_value("2")


def test_a_rate_that_is_needed_is_asked_for(fake: Fake, videos: Page) -> None:
    fake.capabilities = CAPABILITIES | VIDEO | {"fps": None}
    videos.reload()
    ready(videos)
    videos.fill("#prompt", "a")
    videos.click("#generate")
    expect(videos.locator("#fps-error")).to_contain_text("frames per second")
    videos.fill("#fps", "12")
    generate(videos)
    assert fake.sent[0]["fps"] == 12


@pytest.mark.parametrize("format", ["webm", "gif", "webp"])
def test_every_format_is_shown(fake: Fake, videos: Page, format: str) -> None:
    videos.select_option("#output_format", format)
    generate(videos)
    assert fake.sent[0]["output_format"] == format
    if format == "webm":
        until(lambda: videos.get_by_label("Video of: a valley").evaluate(PLAYS) == [96, 64], 20)
    else:
        picture = videos.get_by_alt_text("Video of: a valley")
        until(lambda: picture.evaluate("i => [i.naturalWidth, i.naturalHeight]") == [96, 64], 20)
    with videos.expect_download() as download:
        videos.click("text=Download")
    assert download.value.suggested_filename == f"polymux-1-seed-{2**64 - 9}.{format}"
    with open(download.value.path(), "rb") as file:
        assert file.read() == video_file(96, 64, 9, 16.0, format)  # type: ignore[arg-type]


def test_files_are_sent_where_the_pipeline_wants_them(fake: Fake, videos: Page) -> None:
    fake.capabilities = CAPABILITIES | ANIMATE | {"required": ["prompt", "image"]}
    videos.reload()
    ready(videos)
    videos.fill("#prompt", "move")
    videos.click("#generate")
    expect(videos.locator("#image-error")).to_contain_text("needs one")
    clip = video_file(32, 32, 5, 8.0, "mp4")
    pictures = [png(48, 32, "a.png"), png(16, 16, "b.png")]
    videos.set_input_files("#image", [pictures[0]])
    videos.set_input_files("#reference_images", pictures)
    videos.set_input_files("#video", [pictures[0]])
    expect(videos.locator("#video-error")).to_have_text("Not a video: a.png")
    videos.set_input_files("#video", [{"name": "clip.mp4", "mimeType": "video/mp4", "buffer": clip}])
    generate(videos, "move")
    assert fake.sent[0]["media"] == {
        "image": [pictures[0]["buffer"]],
        "reference_images": [picture["buffer"] for picture in pictures],
        "video": [clip],
    }
    expect(fact(videos, "Input")).to_have_text("a.png, a.png, b.png, clip.mp4")
    videos.click("text=Use as input")  # the one that takes videos
    expect(videos.get_by_label("polymux-1-seed-18446744073709551607.mp4", exact=True)).to_be_visible()
    fake.error = (400, {"message": "media.last_image: it cannot be read", "param": "media.last_image"})
    videos.click("#generate")
    expect(videos.locator("#last_image-error")).to_have_text("It cannot be read")


@pytest.mark.parametrize("how", ["Escape", "button"])
def test_cancelling_deletes_the_job(fake: Fake, videos: Page, how: str) -> None:
    fake.hold_at = 40
    videos.fill("#prompt", "waves")
    videos.click("#generate")
    expect(videos.locator("#phase")).to_contain_text("40 %")
    [job] = fake.jobs.videos
    videos.keyboard.press("Escape") if how == "Escape" else videos.click("#cancel")
    expect(videos.locator("#announce")).to_have_text("Cancelled")
    expect(videos.locator("#cancel")).to_be_hidden()
    assert fake.jobs.deleted == [job]
    fake.go.set()
    generate(videos)  # the next one works


def test_a_job_that_is_cancelled_while_it_is_sent_is_deleted(fake: Fake, videos: Page) -> None:
    fake.hold_at = 0
    videos.fill("#prompt", "waves")
    videos.click("#generate")
    until(lambda: fake.sent != [], 20)
    videos.keyboard.press("Escape")
    fake.go.set()
    expect(videos.locator("#announce")).to_have_text("Cancelled")
    assert len(fake.jobs.deleted) == 1


def test_a_running_job_survives_a_reload(fake: Fake, videos: Page) -> None:
    fake.hold_at = 40
    videos.fill("#prompt", "waves")
    videos.fill("#num_inference_steps", "7")
    videos.click("#generate")
    expect(videos.locator("#phase")).to_contain_text("40 %")
    videos.reload()
    expect(videos.locator("#phase")).to_contain_text("40 %")
    expect(videos.locator("#cancel")).to_be_visible()
    fake.go.set()
    until(lambda: videos.get_by_label("Video of: waves").evaluate(PLAYS) == [96, 64], 20)
    videos.click("text=Use these settings")
    expect(videos.locator("#num_inference_steps")).to_have_value("7")
    expect(videos.locator("#seed")).to_have_value(str(2**64 - 9))
    assert len(fake.sent) == 1
    videos.reload()
    expect(results(videos)).to_have_count(1)
    results(videos).locator("button").click()
    expect(fact(videos, "Steps")).to_have_text("7")


def test_a_job_of_somebody_else_is_not_taken_over(fake: Fake, videos: Page, tab: Callable[..., Page]) -> None:
    fake.hold_at = 40
    videos.fill("#prompt", "waves")
    videos.click("#generate")
    expect(videos.locator("#phase")).to_contain_text("40 %")
    add_video(fake, "before")
    other = ready(tab(fake.url, IMPATIENT))
    expect(results(other)).to_have_count(1)
    expect(other.locator("#cancel")).to_be_hidden()
    videos.keyboard.press("Escape")
    expect(videos.locator("#announce")).to_have_text("Cancelled")


def test_videos_that_the_server_keeps_are_listed_and_can_be_deleted(fake: Fake, videos: Page) -> None:
    ids = [add_video(fake, prompt) for prompt in ("first", "second")]
    videos.reload()
    ready(videos)
    expect(results(videos)).to_have_count(2)
    assert fake.jobs.fetched == []  # files come when they are looked at
    videos.click("[aria-label$=': first']")
    until(lambda: videos.get_by_label("Video of: first").evaluate(PLAYS) == [96, 64], 20)
    assert fake.jobs.fetched == ids[:1]
    expect(fact(videos, "Kept until")).to_be_visible()
    expect(videos.locator(".result >> text=Copy as curl")).to_have_count(0)  # its settings are not known
    videos.once("dialog", lambda dialog: dialog.dismiss())
    videos.click(".result >> text=Delete")
    assert fake.jobs.deleted == []
    videos.once("dialog", lambda dialog: dialog.accept())
    videos.click(".result >> text=Delete")
    expect(results(videos)).to_have_count(1)
    assert fake.jobs.deleted == ids[:1]
    until(lambda: videos.get_by_label("Video of: second").evaluate(PLAYS) == [96, 64], 20)


@pytest.mark.parametrize(("param", "place"), [("seconds", "#seconds-error"), (None, "#alert")])
def test_why_a_job_failed_is_told(fake: Fake, videos: Page, param: str | None, place: str) -> None:
    fake.jobs.ends_with = {"code": "x", "message": "out of memory", "param": param}
    videos.fill("#prompt", "a")
    videos.click("#generate")
    expect(videos.locator(place)).to_have_text("Out of memory" if param else "out of memory")
    expect(results(videos)).to_have_count(0)
    fake.jobs.ends_with = None
    generate(videos)


def _failing(status: int, **headers: str) -> Response:
    return JSONResponse({"error": {"message": "not now.", "param": None, "code": "x"}}, status, headers)


def waits(page: Page) -> list[float]:
    """Of the job; the model's status is asked for every 10 and every 2 seconds."""
    return [ms for ms in page.evaluate("window.waits") if ms not in (10_000, 2_000)]


def test_it_asks_less_often_while_nothing_changes(fake: Fake, videos: Page) -> None:
    fake.hold_at = 40
    videos.fill("#prompt", "a")
    videos.click("#generate")
    until(lambda: fake.jobs.polls > 12, 30)
    fake.go.set()
    expect(results(videos)).to_have_count(1)
    # Queued, started, 40 %; then nothing, up to 10 s; then 87 %, 95 %, done
    assert waits(videos) == [1000, 1000, 1000, 1500, 2250, 3375, 5062.5, 7593.75, 1000, 1000]


def test_it_goes_on_when_the_server_comes_back(fake: Fake, videos: Page) -> None:
    fake.jobs.trouble = [_failing(503), _failing(429, **{"retry-after": "42"}), _failing(502)]
    generate(videos)
    assert waits(videos)[:3] == [1000, 42_000, 1000]
    expect(videos.locator("#alert")).to_be_empty()
    fake.jobs.trouble = [_failing(404)]
    videos.click("#generate")
    expect(videos.locator("#alert")).to_have_text("not now.")


def test_it_does_not_ask_while_nobody_looks(fake: Fake, videos: Page) -> None:
    fake.hold_at = 40
    videos.fill("#prompt", "a")
    videos.click("#generate")
    expect(videos.locator("#phase")).to_contain_text("40 %")
    see = """seen => {
        Object.defineProperty(document, "hidden", { value: !seen, configurable: true });
        document.dispatchEvent(new Event("visibilitychange"));
    }"""
    videos.evaluate(see, False)
    videos.evaluate("new Promise(go => setInterval(go, 500))")  # a question that was under way has its answer
    polls = fake.jobs.polls
    videos.evaluate("new Promise(go => setInterval(go, 500))")  # a dozen of its waits
    assert fake.jobs.polls == polls
    fake.go.set()
    videos.evaluate(see, True)
    expect(results(videos)).to_have_count(1)


@pytest.mark.parametrize("width", [360, 1280])
def test_it_fits_the_screen(fake: Fake, tab: Callable[..., Page], width: int) -> None:
    fake.capabilities = CAPABILITIES | ANIMATE
    add_video(fake, "y" * 300)
    options: dict[str, Any] = {"viewport": {"width": width, "height": 700}, "reduced_motion": "reduce"}
    page = ready(tab(fake.url, IMPATIENT, **options))
    page.select_option("#size", "1280x720")
    fake.hold_at = 40
    page.fill("#prompt", "x" * 400)
    page.click("#generate")
    expect(page.locator("#phase")).to_contain_text("40 %")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.evaluate("document.getAnimations().length") == 0
    fake.go.set()
    shown = page.locator("video.picture")
    until(lambda: shown.evaluate(PLAYS) == [1280, 720], 20)
    assert shown.evaluate("v => v.paused")  # no motion where none is wanted
    assert page.evaluate("document.documentElement.scrollWidth") == width


def test_the_keyboard_reaches_everything(fake: Fake, videos: Page) -> None:
    generate(videos)
    videos.locator(".skip").focus()
    reached = []
    for _ in range(60):
        videos.keyboard.press("Tab")
        reached.append(videos.evaluate("(e => e.id || e.ariaLabel || e.textContent.trim())(document.activeElement)"))
        if reached[-1] == "Skip to the prompt":
            break
    wanted = ["seconds", "num_frames", "fps", "output_format", "generate", "Video of: a valley", "Use these settings"]
    assert [name for i, name in enumerate(reached) if name in wanted and name not in reached[:i]] == wanted
    assert reached.index("Delete") < reached.index("Result 1: a valley")
