"""POST /v1/images/edits and /v1/images/variations, with a stand-in for the model."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from fake_omni import client
from PIL import Image
from test_images_route import error_of, outcomes
from upload_forms import BASE, EDITS, VARIATIONS, data_url, editor, file_of, form, picture, send

from polymux.media.wire import from_wire
from polymux.request import ImageData
from polymux.server.protocol import ImageFields

PNG = file_of(picture())
MASKED: dict[str, Any] = {"media": {"image": 1, "mask_image": 1}}


def refused(response: httpx.Response, param: str | None, status: int = 400) -> str:
    assert response.status_code == status, response.text
    error = error_of(response)
    assert error["param"] == param
    return str(error["message"])


def pixels(media: Any) -> Image.Image:
    image = from_wire(media)
    assert isinstance(image, Image.Image)
    return image


@pytest.mark.parametrize("name", ["image", "image[]"])
def test_an_upload_reaches_the_pipelines_argument(name: str) -> None:
    omni = editor()
    response = form((name, PNG), omni=omni)
    assert response.status_code == 200, response.text
    (request,) = omni.requests
    (sent,) = request.media["image"]
    assert isinstance(sent, ImageData)
    assert (sent.mode, sent.width, sent.height) == ("RGB", 50, 35)
    assert request.prompt == "a"


@pytest.mark.parametrize("argument", ["image", "images", "input_images", "reference_images"])
def test_whatever_the_pipeline_calls_it_the_client_says_image(argument: str) -> None:
    changes: dict[str, Any] = {"media": {argument: 1}, "required": (argument, "prompt")}
    arguments = ("prompt", "height", "width", argument)
    omni = editor(arguments=arguments, **changes)
    assert form(("image", PNG), omni=omni).status_code == 200
    assert list(omni.requests[0].media) == [argument]
    two = form(("image[]", PNG), ("image[]", PNG), omni=omni)
    assert "2 pictures are given, the model takes 1" in refused(two, "image")
    without = send(omni, "/v1/images/generations", json={"prompt": "a"})
    assert "/v1/images/edits" in refused(without, "image")


def test_a_prompt_that_must_name_its_pictures() -> None:
    omni = editor(picture_mark="<p{}>")
    two = (("image[]", PNG), ("image[]", PNG))
    for prompt, seen in (("a", "<p1> <p2> a"), ("<p2> on <p1>", "<p2> on <p1>")):
        assert form(*two, omni=omni, prompt=prompt).status_code == 200
        assert omni.requests.pop().prompt == seen
    assert "picture 2 belongs" in refused(form(*two, omni=omni, prompt="<p1>"), "prompt")
    assert "no picture 3" in refused(form(*two, omni=omni, prompt="<p1> <p2> <p3>"), "prompt")


@pytest.mark.parametrize("names", [("image[]", "image[]"), ("image", "image"), ("image", "image[]")])
def test_several_pictures_in_order(names: tuple[str, str]) -> None:
    omni = editor()
    other = file_of(picture(size=(20, 20)))
    assert form((names[0], PNG), (names[1], other), omni=omni).status_code == 200
    assert [m.width for m in omni.requests[0].media["image"] if isinstance(m, ImageData)] == [50, 20]


def test_more_pictures_than_the_model_takes() -> None:
    assert "3 pictures" in refused(form(*[("image[]", PNG)] * 3), "image")


def test_no_picture() -> None:
    omni = editor()
    message = refused(send(omni, data=BASE, files=[("prompt", (None, "a"))]), "prompt")
    assert "more than once" in message
    assert "missing" in refused(send(omni, files=[("prompt", (None, "a"))]), "image")
    assert "missing" in refused(send(omni, json={"prompt": "a"}), "image")
    assert outcomes(omni) == {"rejected": 3} or sum(outcomes(omni).values()) == 3


@pytest.mark.parametrize("content", [b"", b"this is text", PNG[: len(PNG) * 8 // 10], PNG[:8]])
def test_a_file_that_is_no_whole_picture(content: bytes) -> None:
    omni = editor()
    refused(form(("image", content), omni=omni), "image")
    assert omni.requests == []


def test_a_model_that_takes_no_pictures() -> None:
    omni = editor(media={}, required=("prompt",))
    assert "text alone" in refused(form(("image", PNG), omni=omni), "image")
    omni = editor(media={"control_image": 1}, required=("prompt",))
    assert "only control_image" in refused(form(("image", PNG), omni=omni), "image")


def test_a_model_that_takes_no_mask() -> None:
    assert "takes none" in refused(form(("image", PNG), ("mask", PNG)), "mask")


@pytest.mark.parametrize(
    "body",
    [
        {"image": data_url(PNG)}, {"image": [data_url(PNG)]}, {"images": data_url(PNG)},
        {"images": [{"image_url": data_url(PNG)}]}, {"image": {"image_url": data_url(PNG)}},
        {"image": data_url(PNG), "images": None, "mask": None},
    ],
)  # fmt: skip
def test_json_with_data_urls(body: dict[str, Any]) -> None:
    omni = editor()
    response = send(omni, json={"prompt": "a"} | body)
    assert response.status_code == 200, response.text
    assert len(omni.requests[0].media["image"]) == 1


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"images": [{"file_id": "file-1"}]}, "images"),
        ({"images": [{"image_url": data_url(PNG), "file_id": "f"}]}, "images"),
        ({"image": 3}, "image"), ({"images": [None]}, "images"), ({"images": []}, "images"), ({"image": []}, "image"),
        ({"image": "a.png"}, "image"), ({"image": "/etc/passwd"}, "image"), ({"image": "file:///etc/passwd"}, "image"),
        ({"image": "data:image/png;base64,!!!"}, "image"), ({"image": data_url(b"text")}, "image"),
        ({"images": [data_url(PNG), data_url(b"text")]}, "images.1"),
        ({"images": [data_url(PNG)] * 3}, "images"),
        ({"image": "http://127.0.0.1/a.png"}, "image"), ({"image": "http://169.254.169.254/"}, "image"),
        ({"image": data_url(PNG), "images": [data_url(PNG)]}, "images"),
        ({"image": data_url(PNG), "mask": [data_url(PNG)]}, "mask"),
    ],
)  # fmt: skip
def test_json_that_names_no_picture(body: dict[str, Any], param: str) -> None:
    omni = editor()
    message = refused(send(omni, json={"prompt": "a"} | body), param)
    assert param.partition(".")[0] in message
    assert len(message) < 400
    assert omni.requests == []


@pytest.mark.parametrize(
    ("field", "text", "sampled"),
    [
        ("n", "2", ("num_outputs_per_prompt", 2)),
        ("seed", "18446744073709551614", ("seed", 2**64 - 2)),
        ("num_inference_steps", "3", ("num_inference_steps", 3)),
        ("guidance_scale", "2", ("guidance_scale", 2.0)),
        ("guidance_scale", "2.5e-1", ("guidance_scale", 0.25)),
        ("strength", "0.5", ("strength", 0.5)),
        ("sigmas", "[1, 0.5]", ("sigmas", (1.0, 0.5))),
        ("extra_args", '{"eta": 0.5}', ("extra_args", {"eta": 0.5})),
        ("size", "64x32", ("width", 64)),
        ("n", "null", ("num_outputs_per_prompt", 1)),
    ],
)
def test_fields_of_a_form(field: str, text: str, sampled: tuple[str, Any]) -> None:
    omni = editor()
    response = form(("image", PNG), omni=omni, **{field: text})
    assert response.status_code == 200, response.text
    assert getattr(omni.requests[0].params, sampled[0]) == sampled[1]


@pytest.mark.parametrize("text", ["2", "true", "null", "[1]", "NaN", "ä 🙂", " a ", '"a"'])
def test_texts_in_a_form_are_taken_as_they_are(text: str) -> None:
    omni = editor()
    assert form(("image", PNG), omni=omni, prompt=text).status_code == 200
    assert omni.requests[0].prompt == text


def test_a_list_of_a_form_item_by_item() -> None:
    omni = editor()
    assert form(("image", PNG), omni=omni, **{"sigmas[]": ["1.0", "0.5"]}).status_code == 200
    assert omni.requests[0].params.sigmas == (1.0, 0.5)


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("n", "2.0x"), ("n", "2.0"), ("n", "x"), ("n", ""), ("n", "0"), ("n", "true"), ("n", "1000000"), ("n", "[1]"),
        ("n", "1_0"), ("n", "٢"), ("n", "0x2"), ("n", "+2"), ("n", "9" * 5000),
        ("seed", "1.5"), ("seed", "abc"), ("seed", str(2**64)), ("num_inference_steps", "0"),
        ("guidance_scale", "NaN"), ("guidance_scale", "Infinity"), ("guidance_scale", "1e999"), ("guidance_scale", "x"),
        ("size", "64"), ("size", "0x64"), ("size", "65x63"), ("size", ""), ("size", "100000x100000"),
        ("strength", "2"), ("output_format", "gif"), ("output_compression", "101"), ("response_format", "banana"),
        ("extra_args", "eta"), ("extra_args", "[1]"), ("quality", "hd"), ("background", "transparent"),
        ("input_fidelity", "high"), ("nope", "1"), ("image_url", "x"), ("n[]", "1"),
    ],
)  # fmt: skip
def test_a_wrong_field_of_a_form_is_a_400_that_names_it(field: str, text: str) -> None:
    omni = editor()
    message = refused(form(("image", PNG), omni=omni, **{field: text}), field)
    assert field in message
    assert len(message) < 600
    assert omni.requests == []


@pytest.mark.parametrize("field", ["prompt", "n", "size", "model", "nope"])
def test_a_field_twice(field: str) -> None:
    values = {"model": "fake/model", "n": "1", "size": "64x32"}
    message = refused(form(("image", PNG), **{field: [values.get(field, "a")] * 2}), field)
    assert "more than once" in message


@pytest.mark.parametrize("whole", ["[1.0]", "x", "null", "1"])
def test_a_list_both_ways(whole: str) -> None:
    message = refused(form(("image", PNG), sigmas=whole, **{"sigmas[]": "1.0"}), "sigmas")
    assert "more than once" in message


def test_two_masks() -> None:
    refused(form(("image", PNG), ("mask", PNG), ("mask", PNG), omni=editor(**MASKED)), "mask")


def test_a_plain_field_that_is_a_file() -> None:
    assert "filename" in refused(form(("image", PNG), ("size", b"64x32")), "size")


def test_a_picture_by_url_in_a_form() -> None:
    omni = editor()
    response = send(omni, data=BASE, files=[("image", (None, data_url(PNG)))])
    assert response.status_code == 200, response.text
    assert "must be a data: URL" in refused(send(omni, data=BASE, files=[("image", (None, "a.png"))]), "image")


@pytest.mark.parametrize(
    ("size", "asked"),
    [("auto", (48, 32)), (None, (48, 32)), ("64x16", (64, 16))],
)
def test_size_auto_is_that_of_the_picture_aligned_and_stated(size: str | None, asked: tuple[int, int]) -> None:
    omni = editor()
    answer = form(("image", PNG), omni=omni, **({} if size is None else {"size": size}))
    params = omni.requests[0].params
    assert (params.width, params.height) == asked
    assert answer.json()["size"] == answer.json()["data"][0]["size"] == f"{asked[0]}x{asked[1]}"


def test_a_picture_smaller_than_what_the_model_makes() -> None:
    omni = editor()
    assert form(("image", file_of(picture(size=(3, 40)))), omni=omni).status_code == 200
    assert (omni.requests[0].params.width, omni.requests[0].params.height) == (16, 32)


def test_a_picture_larger_than_what_may_be_made() -> None:
    omni = editor()
    omni.config = type(omni)(max_generated_image_size=1000).config
    assert "--max-generated-image-size" in refused(form(("image", PNG), omni=omni, size="auto"), "size")


def test_a_model_that_takes_its_size_from_the_picture() -> None:
    arguments = ("prompt", "image", "strength")
    omni = editor(arguments=arguments, picture_sized=True)
    for size, seen in (("auto", (48, 32)), ("64x64", (64, 64))):
        assert form(("image", PNG), omni=omni, size=size).status_code == 200
        request = omni.requests.pop()
        assert (request.params.width, request.params.height) == (None, None)
        assert pixels(request.media["image"][0]).size == seen
    assert "multiple of 16" in refused(form(("image", PNG), omni=omni, size="65x64"), "size")


def test_a_model_that_decides_its_size() -> None:
    omni = editor(arguments=("prompt", "image"))
    assert form(("image", PNG), omni=omni, size="auto").status_code == 200
    assert "does not take it" in refused(form(("image", PNG), omni=omni, size="64x64"), "size")


def test_pixels_of_all_pictures_together() -> None:
    limits = {"max_input_image_size": 50 * 35 + 10}
    files = [("image[]", ("a.png", PNG, "image/png"))] * 2
    assert send(editor(), data=BASE, files=files[:1], server=limits).status_code == 200
    assert "--max-input-image-size" in refused(send(editor(), data=BASE, files=files, server=limits), "image")


def half_transparent(mode: str = "RGBA") -> Image.Image:
    image = picture("RGBA")
    image.putalpha(Image.new("L", image.size, 255))
    image.paste((0, 0, 0, 0), (0, 0, 25, 35))
    return image


def test_transparent_parts_are_white_where_the_model_knows_no_alpha() -> None:
    omni = editor()
    assert form(("image", file_of(half_transparent())), omni=omni).status_code == 200
    sent = pixels(omni.requests[0].media["image"][0])
    assert (sent.mode, sent.getpixel((0, 0))) == ("RGB", (255, 255, 255))


def test_alpha_is_kept_where_the_model_knows_it() -> None:
    omni = editor(alpha=True)
    assert form(("image", file_of(half_transparent())), omni=omni, background="transparent").status_code == 200
    assert pixels(omni.requests[0].media["image"][0]).mode == "RGBA"
    response = form(("image", PNG), omni=omni, background="transparent", output_format="jpeg")
    assert "png" in refused(response, "background")


def test_opaque_is_what_most_models_make_anyway() -> None:
    assert form(("image", PNG), background="opaque").status_code == 200


def mask_of(omni: Any) -> Image.Image:
    return pixels(omni.requests.pop().media["mask_image"][0])


def test_masks_say_in_white_or_by_transparency_what_is_to_change() -> None:
    omni = editor(**MASKED)
    white = Image.new("L", (50, 35), 0)
    white.paste(255, (0, 0, 25, 35))
    for mask in (white, white.convert("RGB"), half_transparent()):
        assert form(("image", PNG), ("mask", file_of(mask)), omni=omni).status_code == 200
        seen = mask_of(omni)
        assert (seen.mode, seen.getpixel((0, 0)), seen.getpixel((49, 0))) == ("L", 255, 0)


def test_a_mask_of_another_size() -> None:
    other = file_of(picture(size=(50, 36)))
    assert "50x36" in refused(form(("image", PNG), ("mask", other), omni=editor(**MASKED)), "mask")


def test_a_mask_that_the_model_needs() -> None:
    omni = editor(**MASKED, required=("image", "mask_image", "prompt"))
    assert "transparent parts" in refused(form(("image", PNG), omni=omni), "mask")
    assert form(("image", file_of(half_transparent())), omni=omni).status_code == 200
    assert mask_of(omni).getpixel((0, 0)) == 255


def test_variations_of_a_model_that_makes_them() -> None:
    omni = editor(variations=True)
    files = [("image", ("a.png", PNG, "image/png"))]
    response = send(omni, VARIATIONS, data={"n": "2", "size": "64x32"}, files=files)
    assert response.status_code == 200, response.text
    assert (omni.requests[0].prompt, omni.requests[0].params.num_outputs_per_prompt) == ("", 2)
    assert "unknown field" in refused(send(omni, VARIATIONS, data={"prompt": "a"}, files=files), "prompt")
    assert "missing" in refused(send(omni, VARIATIONS, files=[("n", (None, "1"))]), "image")
    refused(send(omni, VARIATIONS, json={"image": data_url(PNG)}), None, 415)


def test_variations_of_a_model_that_makes_none() -> None:
    message = refused(send(editor(), VARIATIONS, files=[("image", ("a.png", PNG, "image/png"))]), "model")
    assert "no variations" in message


def test_a_model_that_is_not_ready_fetches_nothing() -> None:
    omni = editor()
    omni.status = "loading"
    refused(send(omni, json={"prompt": "a", "image": "http://127.0.0.1/"}), None, 503)


def test_edits_take_all_that_generations_take() -> None:
    omni = editor()
    defaults: dict[str, Any] = {
        "model": "fake/model", "user": "u", "response_format": "b64_json", "output_format": "webp",
        "output_compression": 50, "quality": "auto", "background": "auto", "moderation": "auto",
    }  # fmt: skip
    body = {name: defaults.get(name) for name in ImageFields.model_fields}
    response = send(omni, json={"prompt": "a", "image": data_url(PNG)} | body)
    assert response.status_code == 200, response.text
    assert response.json()["output_format"] == "webp"


def test_a_huge_upload_is_a_413() -> None:
    response = send(
        editor(), EDITS, {"max_body_bytes": 2000}, data=BASE, files=[("image", ("a.png", b"x" * 3000, "image/png"))]
    )
    refused(response, None, 413)


@pytest.mark.parametrize(("mode", "size", "room_for"), [("RGB", 4, 2), ("RGBA", 4, 3), ("L", 1, 2)])
def test_decoded_pictures_count_until_their_request_ends(mode: str, size: int, room_for: int) -> None:
    """However small they are on the wire. One without alpha is made from one with it, so there are two for a moment."""
    omni = editor()
    files = [("image", ("a.png", file_of(Image.new(mode, (64, 64))), "image/png"))]
    limit = 64 * 64 * size * room_for + 1000

    async def scenario() -> None:
        omni.hold.clear()
        async with client(omni, max_total_media_bytes=limit) as http:
            first = [asyncio.create_task(http.post(EDITS, data=BASE, files=files)) for _ in range(2)]
            while len(omni.requests) < 2:
                await asyncio.sleep(0.01)
            third = await http.post(EDITS, data=BASE, files=files)
            assert (third.status_code, error_of(third)["code"]) == (503, "server_overloaded")
            assert third.headers["retry-after"] == "1"
            omni.hold.set()
            assert [(await one).status_code for one in first] == [200, 200]
            assert (await http.post(EDITS, data=BASE, files=files)).status_code == 200

    asyncio.run(asyncio.wait_for(scenario(), 30))
