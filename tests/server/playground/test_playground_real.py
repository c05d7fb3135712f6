"""The playground over the real routes: with a real model, and with a generator that shows what reached it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from browser import Page, copied, execute, expect, fact, generate, offered, png, ready, results
from fake_media import sound_file
from painter import Singer, serving_painter
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
    expect(page.locator("#num_inference_steps-error")).to_contain_text("Must be from 1 to 200000")
    page.fill("#num_inference_steps", "2")
    page.fill("#width", "95")
    page.click("#generate")
    expect(page.locator("#size-error")).to_contain_text("multiple of 16")
    expect(results(page)).to_have_count(1)


def test_edit_with_a_key_and_commands_that_make_the_same_picture(tab: Callable[..., Page], tmp_path: Path) -> None:
    with serving_painter(api_key=("secret",)) as url:
        page = tab(url)
        page.fill("#api-key", "secret")
        page.keyboard.press("Enter")
        assert {"image", "mask", "strength"} <= offered(ready(page))
        page.fill("#prompt", "snow")
        page.click("#generate")
        expect(page.locator("#image-error")).to_contain_text("needs one")
        files = {"image": png(64, 48, "photo.png"), "mask": png(64, 48, "mask.png")}
        page.set_input_files("#image", [files["image"]])
        page.click("#generate")
        expect(page.locator("#mask-error")).to_contain_text("the model needs one")
        page.set_input_files("#mask", [files["mask"]])
        page.fill("#num_inference_steps", "4")
        page.fill("#strength", "0.75")
        generate(page, "snow")
        expect(fact(page, "Size")).to_have_text("64 × 48")
        with page.expect_download() as download:
            page.click("text=Download")
        shown = Path(download.value.path()).read_bytes()
        for file in files.values():
            (tmp_path / file["name"]).write_bytes(file["buffer"])
        for language, words in (("curl", "Copy as curl"), ("python", "Copy as Python")):
            execute(language, copied(page, f".result >> text={words}"), tmp_path)
            made = tmp_path / "picture-0.png"
            assert made.read_bytes() == shown
            made.unlink()


def test_sound_and_commands_that_make_the_same(tab: Callable[..., Page], tmp_path: Path) -> None:
    with serving_painter(Singer(), api_key=("secret",)) as url:
        page = tab(url)
        page.fill("#api-key", "secret")
        page.keyboard.press("Enter")
        ready(page)
        page.fill("#seconds", "11")
        page.fill("#prompt", "la")
        page.click("#generate")
        expect(page.locator("#seconds-error")).to_contain_text("10")
        page.fill("#seconds", "0.5")
        page.set_input_files("#src_audio", [{"name": "hum.wav", "mimeType": "audio/wav", "buffer": b"no sound"}])
        page.click("#generate")
        expect(page.locator("#src_audio-error")).to_be_visible()
        hum = sound_file(0.25, "wav")
        (tmp_path / "hum.wav").write_bytes(hum)
        page.click("button[aria-label='Remove hum.wav']")
        page.set_input_files("#src_audio", [{"name": "hum.wav", "mimeType": "audio/wav", "buffer": hum}])
        generate(page, "la")
        expect(fact(page, "Length")).to_have_text("0.50 s")
        with page.expect_download() as download:
            page.click("text=Download")
        shown = Path(download.value.path()).read_bytes()
        for language, words in (("curl", "Copy as curl"), ("python", "Copy as Python")):
            execute(language, copied(page, f".result >> text={words}"), tmp_path)
            made = tmp_path / "sound.wav"
            assert made.read_bytes() == shown
            made.unlink()


def test_a_video_of_a_real_model(video_server: tuple[Server, Path], tab: Callable[..., Page], tmp_path: Path) -> None:
    server, _ = video_server
    page = ready(tab(server.url))
    assert {"seconds", "num_frames", "fps", "size", "guidance_scale"} <= offered(page)
    jobs = server.http.get("/v1/videos?limit=50").json()["data"]
    before = sum(job["status"] == "completed" for job in jobs)  # of other tests
    expect(results(page)).to_have_count(before)
    page.select_option("#size", "custom")
    page.fill("#width", "64")
    page.fill("#height", "64")
    page.fill("#num_inference_steps", "2")
    page.fill("#num_frames", "6")
    page.fill("#seed", "5")
    page.fill("#prompt", "waves")
    page.click("#generate")
    expect(page.locator("#num_frames-error")).to_contain_text("multiple of 4")
    page.fill("#num_frames", "5")
    generate(page, "waves", count=before + 1)
    shown = page.get_by_label("Video of: waves")
    until(lambda: shown.evaluate("v => v.readyState >= 2 && [v.videoWidth, v.videoHeight]") == [64, 64], 20)
    expect(fact(page, "Length")).to_contain_text("5 frames")
    with page.expect_download() as download:
        page.click("text=Download")
    made = Path(download.value.path()).read_bytes()
    for language, words in (("curl", "Copy as curl"), ("python", "Copy as Python")):
        execute(language, copied(page, f".result >> text={words}"), tmp_path)
        assert (tmp_path / "video.mp4").read_bytes() == made
        (tmp_path / "video.mp4").unlink()

    aborted = server.outcomes()["aborted"]
    page.fill("#num_inference_steps", "100000")
    page.click("#generate")
    expect(page.locator("#phase")).to_contain_text("%")
    page.reload()
    expect(page.locator("#phase")).to_contain_text("%")
    page.keyboard.press("Escape")
    until(lambda: server.outcomes()["aborted"] == aborted + 1, 30)
    page.once("dialog", lambda dialog: dialog.accept())
    results(page).first.locator("button").click()
    page.click(".result >> text=Delete")
    expect(results(page)).to_have_count(before)
