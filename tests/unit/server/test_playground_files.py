"""The playground's files and routes, without a browser: complete, self-contained, and served safely."""

from __future__ import annotations

import fnmatch
import re
import tomllib
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from polymux.server import errors, playground
from polymux.server.audio import AudioGenerationRequest
from polymux.server.protocol import Body, ImageEditFields, ImageGenerationRequest
from polymux.server.state import ServerState
from polymux.server.video_protocol import VideoRequest
from polymux.server_config import ServerConfig

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "polymux" / "server" / "playground"
TEXTS = {file.name: file.read_text(encoding="utf-8") for file in FOLDER.iterdir() if file.is_file()}
SCRIPTS = {name: text for name, text in TEXTS.items() if name.endswith(".js")}
PAGE = TEXTS["index.html"]


@pytest.fixture(scope="module")
def http() -> TestClient:
    app = FastAPI()
    app.include_router(playground.routes(ServerState(None, ServerConfig())))  # type: ignore[arg-type]
    errors.install(app)
    return TestClient(app)


def test_the_page_is_at_the_root(http: TestClient) -> None:
    response = http.get("/")
    assert response.text == PAGE
    assert response.headers["content-type"] == "text/html; charset=utf-8"


@pytest.mark.parametrize("name", sorted(playground.assets()))
def test_every_file_is_served_as_what_it_is(http: TestClient, name: str) -> None:
    response = http.get(f"/playground/{name}")
    assert response.content == (FOLDER / name).read_bytes()
    assert response.headers["content-type"] == playground.MEDIA_TYPES[name.rpartition(".")[2]]
    assert response.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("url", ["/", "/playground/app.js"])
def test_nothing_foreign_may_load_and_no_inline_script_runs(http: TestClient, url: str) -> None:
    policy = dict(part.split(" ", 1) for part in http.get(url).headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'self'"
    assert not any(word in value for value in policy.values() for word in ("unsafe", "*", "http"))
    assert set(policy["img-src"].split()) == {"'self'", "blob:", "data:"}
    assert set(policy["media-src"].split()) == {"'self'", "blob:"}


def test_what_the_browser_has_is_not_sent_again(http: TestClient) -> None:
    first = http.get("/playground/app.js")
    tag = first.headers["etag"]
    assert first.headers["cache-control"] == "no-cache"
    for given in (tag, f"W/{tag}", f'"other", {tag}'):
        again = http.get("/playground/app.js", headers={"if-none-match": given})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
    assert http.get("/playground/app.js", headers={"if-none-match": '"other"'}).status_code == 200
    assert http.get("/").headers["etag"] != tag


def test_head_has_the_headers_alone(http: TestClient) -> None:
    response = http.head("/")
    assert (response.status_code, response.content) == (200, b"")
    assert response.headers["content-length"] == str(len(PAGE.encode()))


@pytest.mark.parametrize(
    "name", ["", "missing.js", "__init__.py", "..%2f__init__.py", "%2e%2e%2fapp.py", "%2fetc%2fpasswd", "app.js%00"]
)
def test_nothing_else_is_served(http: TestClient, name: str) -> None:
    response = http.get(f"/playground/{name}")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "unknown_url"


@pytest.mark.parametrize("url", ["/", "/playground/app.js"])
def test_it_only_reads(http: TestClient, url: str) -> None:
    assert http.post(url).status_code == 405


def test_every_file_that_is_named_exists() -> None:
    for target in re.findall(r'(?:src|href)="([^"#]+)"', PAGE):
        folder, _, name = target.partition("/")
        assert folder == "playground", target
        assert name in playground.assets(), target


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_every_module_and_name_that_is_imported_exists(name: str) -> None:
    imported = re.findall(r"^import (.+) from \"\./(.+)\";$", SCRIPTS[name], re.M)
    assert len(imported) == len(re.findall(r"^import ", SCRIPTS[name], re.M))
    for what, module in imported:
        exported = set(re.findall(r"^export (?:async )?(?:function\*?|class|const) (\w+)", SCRIPTS[module], re.M))
        names = set(re.findall(r"\w+", what)) if what.startswith("{") else set()
        assert names <= exported, (module, names - exported)


def test_every_element_that_a_script_looks_for_exists() -> None:
    ids = set(re.findall(r'\bid="([^"]+)"', PAGE))
    wanted = {found for text in SCRIPTS.values() for found in re.findall(r"\$\$?\([\"']#([\w-]+)", text)}
    assert wanted
    assert wanted <= ids


def test_every_label_has_its_control_and_every_control_its_label() -> None:
    labelled = re.findall(r'<label[^>]* for="([^"]+)"', PAGE)
    controls = re.findall(r'<(?:input|select|textarea) id="([^"]+)"', PAGE)
    assert sorted(labelled) == sorted(controls)


def test_every_control_is_a_field_of_the_api() -> None:
    bodies = (ImageGenerationRequest, ImageEditFields, VideoRequest, AudioGenerationRequest)
    fields = set(re.findall(r'data-field="(\w+)"', PAGE))
    assert fields
    assert fields <= {name for body in bodies for name in body.model_fields}


@pytest.mark.parametrize(
    ("module", "body"),
    [("image", ImageGenerationRequest), ("video", VideoRequest), ("audio", AudioGenerationRequest)],
)
def test_every_field_that_a_kind_sends_is_one_of_its_route(module: str, body: type[Body]) -> None:
    for words in re.findall(r"^const FIELDS = \[(.+)\];$", SCRIPTS[f"{module}.js"], re.M):
        named = set(re.findall(r'"(\w+)"', words))
        assert named
        # Strength is of edits alone, and offered where there is a picture.
        assert named - ({"strength"} if module == "image" else set()) <= set(body.model_fields)


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_nothing_refers_to_another_host(name: str) -> None:
    text = TEXTS[name].replace('xmlns="http://www.w3.org/2000/svg"', "")  # a name, which nobody fetches
    assert not re.findall(r"\b(?:https?|wss?):|[\"'(=]//\w", text)


def test_no_inline_script_and_no_inline_style() -> None:
    assert not re.findall(r"<style|\sstyle=|\son\w+=|javascript:|<script(?![^>]*\ssrc=)", PAGE)
    assert not [
        name for name, text in SCRIPTS.items() if re.search(r"innerHTML|outerHTML|\beval\(|document\.write", text)
    ]


def test_the_package_holds_every_file() -> None:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = [*tool["package-data"]["polymux.server.playground"], "*.py"]
    assert not [name for name in TEXTS if not any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]
    assert {name for name in TEXTS if not name.endswith(".py")} == set(playground.assets())


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_files_are_short(name: str) -> None:
    assert len(TEXTS[name].splitlines()) <= 400
