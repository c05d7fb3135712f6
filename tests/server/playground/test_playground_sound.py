"""The playground over a server without a model: sound."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from browser import IMPATIENT, Page, copied, execute, expect, fact, generate, offered, ready, results
from fake_media import ANIMATE, SOUND, sound_file, video_file
from fake_server import CAPABILITIES, Fake
from server_process import until

NASTY = 'it\'s "quoted" $HOME `id` \\n; a\nnew line, @file, ünï-code 🦊 {x}'


@pytest.fixture
def sounds(fake: Fake, tab: Callable[..., Page]) -> Page:
    fake.capabilities = CAPABILITIES | SOUND
    return ready(tab(fake.url))


def test_only_what_the_model_takes_is_offered(fake: Fake, sounds: Page) -> None:
    common = {"prompt", "negative_prompt", "num_inference_steps", "seed", "guidance_scale", "response_format"}
    assert offered(sounds) == common | {"seconds"}
    assert sounds.locator("#seconds").get_attribute("max") == "47.5"
    sounds.click("#about summary")
    expect(sounds.locator("#facts")).to_contain_text("16,000 Hz")


@pytest.mark.parametrize("format", ["wav", "flac", "mp3", "opus"])
def test_a_sound(fake: Fake, sounds: Page, format: str) -> None:
    sounds.fill("#seconds", "0.8")
    sounds.select_option("#response_format", "" if format == "wav" else format)
    sounds.fill("#seed", "18446744073709551610")
    generate(sounds, "rain")
    body = {"model": "fake-model", "prompt": "rain", "seconds": 0.8, "seed": 18446744073709551610}
    assert fake.sent == [body if format == "wav" else body | {"response_format": format}]
    shown = sounds.get_by_label("Sound of: rain")
    until(lambda: shown.evaluate("a => a.readyState >= 1 && Math.abs(a.duration - 0.8) < 0.1"), 20)
    assert shown.evaluate("a => a.paused")  # nobody is startled
    expect(fact(sounds, "Seed")).to_have_text("18446744073709551610")
    expect(fact(sounds, "Length")).to_have_text("0.80 s")
    expect(fact(sounds, "Rate")).to_have_text("16000 Hz")
    with sounds.expect_download() as download:
        sounds.click("text=Download")
    assert download.value.suggested_filename == f"polymux-1-seed-18446744073709551610.{format}"
    assert Path(download.value.path()).read_bytes() == sound_file(0.8, format)  # type: ignore[arg-type]
    sounds.fill("#seconds", "")
    sounds.click("text=Use these settings")
    expect(sounds.locator("#seconds")).to_have_value("0.8")
    sounds.click(".result >> text=Remove")
    expect(results(sounds)).to_have_count(0)
    expect(sounds.locator(".empty")).to_contain_text("Your sounds")


def test_cancel(fake: Fake, sounds: Page) -> None:
    fake.hold_at = 1
    sounds.fill("#prompt", "rain")
    sounds.click("#generate")
    until(lambda: fake.sent != [], 20)
    sounds.click("#cancel")
    expect(sounds.locator("#announce")).to_have_text("Cancelled")
    assert fake.left.wait(20)
    fake.go.set()
    generate(sounds)


def test_an_error_stands_beside_its_field(fake: Fake, sounds: Page) -> None:
    fake.error = (400, {"message": "seconds=48.0: the model makes 47.5", "param": "seconds"})
    sounds.fill("#prompt", "rain")
    sounds.fill("#seconds", "48")
    sounds.click("#generate")
    expect(sounds.locator("#seconds-error")).to_have_text("The model makes 47.5")
    expect(sounds.locator("#seconds")).to_be_focused()


@pytest.mark.parametrize("language", ["curl", "python"])
@pytest.mark.parametrize("kind", ["sound", "video"])
@pytest.mark.parametrize("with_file", [False, True])
def test_a_command_does_what_the_page_does(
    fake: Fake, tab: Callable[..., Page], kind: str, language: str, with_file: bool, tmp_path: Path
) -> None:
    word = "Copy as curl" if language == "curl" else "Copy as Python"
    fake.api_key = "secret"
    fake.capabilities = CAPABILITIES | (SOUND | {"media": {"src_audio": 1}} if kind == "sound" else ANIMATE)
    page = tab(fake.url, IMPATIENT)
    page.fill("#api-key", "secret")
    page.keyboard.press("Enter")
    ready(page)
    page.fill("#seconds", "0.5")
    page.fill("#seed", str(2**64 - 5))
    if with_file:
        name = 'a "b"; it\'s.bin'
        content = sound_file(0.5, "wav") if kind == "sound" else video_file(32, 32, 5, 8.0, "mp4")
        given = {"name": name, "mimeType": "audio/wav" if kind == "sound" else "video/mp4", "buffer": content}
        page.set_input_files("#src_audio" if kind == "sound" else "#video", [given])
        (tmp_path / name).write_bytes(content)
    generate(page, NASTY)
    fake.sent.clear()
    form = copied(page, f"#form [data-copy={language}]")
    assert "secret" not in form
    execute(language, form, tmp_path)
    of_one = copied(page, f".result >> text={word}")
    execute(language, of_one, tmp_path)
    assert fake.sent[0] == fake.sent[1]
    assert fake.sent[0]["prompt"] == NASTY and fake.sent[0]["seed"] == 2**64 - 5
    assert ("media" in fake.sent[0]) == with_file
    if with_file:
        assert fake.sent[0]["media"] == {"src_audio" if kind == "sound" else "video": [content]}
    file = tmp_path / ("sound.wav" if kind == "sound" else "video.mp4")
    wanted = sound_file(0.5, "wav") if kind == "sound" else video_file(96, 64, 9, 16.0, "mp4")
    assert file.read_bytes() == wanted


@pytest.mark.parametrize("language", ["curl", "python"])
def test_a_command_says_what_the_server_refuses(fake: Fake, sounds: Page, language: str, tmp_path: Path) -> None:
    sounds.fill("#prompt", "a")
    text = copied(sounds, f"#form [data-copy={language}]")
    fake.error = (400, {"message": "the sound is odd"})
    with pytest.raises(AssertionError, match="the sound is odd"):
        execute(language, text, tmp_path)
    assert list(tmp_path.iterdir()) == []
