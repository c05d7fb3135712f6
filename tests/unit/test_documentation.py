"""What the documentation names exists, and what exists is named. Truth beyond names is for its readers to check."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path

import pytest
from source_tree import ROOT

from polymux.cli import bench, generate, models, serve, speak
from polymux.cli.flags import Parser, flag_of
from polymux.cli.main import main
from polymux.config import EngineConfig
from polymux.families import all_families
from polymux.families.base import Family
from polymux.families.features import FEATURES, features_by_pipeline
from polymux.knobs import groups_of
from polymux.omni_output import OmniRequestOutput
from polymux.request import OmniDiffusionSamplingParams, SamplingParams
from polymux.server_config import ServerConfig
from polymux.version import VERSION

DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.glob("*.md"), ROOT / "README.md", ROOT / "CHANGELOG.md"])
GROUPS = (*groups_of(EngineConfig).values(), ServerConfig, *groups_of(ServerConfig).values())
KNOBS = [f for group in GROUPS for f in dataclasses.fields(group) if f.metadata]
LATER = {"performance.md"}  # pages that are linked before they are written


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def code(text: str) -> set[str]:
    return set(re.findall(r"`([^`\n]+)`", text))


def section(text: str, title: str) -> str:
    """What stands under a heading, up to the next one of its level or above."""
    level = title.split()[0]
    return re.split(rf"\n#{{1,{len(level)}}} ", text.split(f"\n{title}\n")[1])[0]


def test_families_are_the_declared_ones(capsys: pytest.CaptureFixture[str]) -> None:
    """`polymux models --markdown > docs/families.md` makes it."""
    assert main(["models", "--markdown"]) == 0
    assert capsys.readouterr().out == page("families.md")


def test_compatibility_is_what_was_found(capsys: pytest.CaptureFixture[str]) -> None:
    """`polymux models --compatibility > docs/compatibility.md` makes it."""
    assert main(["models", "--compatibility"]) == 0
    assert capsys.readouterr().out == page("compatibility.md")


def test_every_declared_pipeline_was_looked_at() -> None:
    """`python -m polymux.testing.features > polymux/families/features.json` looks."""
    found = features_by_pipeline()
    assert found.keys() == {pipeline for family in all_families() for pipeline in family.pipelines}
    assert set().union(*found.values()) == set(FEATURES)


def flags_of(command: object) -> set[str]:
    parser = Parser(prog="polymux")
    command.add_arguments(parser)  # type: ignore[attr-defined]
    return {flag for action in parser._actions for flag in action.option_strings} - {"--help", "-h"}


def test_every_flag_is_documented_and_no_other() -> None:
    text = page("cli.md")
    documented = {title: rows_of_flags(section(text, title)) for title in re.findall(r"^## .*", text, re.M)}
    shared = set().union(*(flags for title, flags in documented.items() if "polymux " not in title))
    assert documented["## polymux generate"] | shared == flags_of(generate)
    assert documented["## polymux speak"] | shared == flags_of(speak)
    assert documented["## polymux serve"] | shared == flags_of(serve)
    assert documented["## polymux models"] == flags_of(models)
    assert documented["## polymux bench"] == flags_of(bench)


def rows_of_flags(text: str) -> set[str]:
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `-")]
    return {word for row in rows for word in re.findall(r"(?<![\w-])--?[a-z][a-z0-9-]*", row)}


@pytest.mark.parametrize("name", [p.name for p in PAGES])
def test_every_flag_that_is_named_exists(name: str) -> None:
    (file,) = [p for p in PAGES if p.name == name]
    named = {w for span in code(file.read_text(encoding="utf-8")) for w in re.findall(r"^--[a-z][a-z0-9-]*", span)}
    known = set().union(*map(flags_of, (generate, speak, serve, models, bench))) | {"--help", "--version"}
    foreign = {"--no-deps"} | (foreign_flags() if name == "differences.md" else set())
    assert named <= known | foreign


def foreign_flags() -> set[str]:
    """Flags of the other system that polymux does not have: those in the first column of their table."""
    rows = section(page("differences.md"), "## Flags").splitlines()
    return {flag for row in rows if row.startswith("| `") for flag in re.findall(r"--[a-z0-9-]+", row.split("|")[1])}


@pytest.mark.parametrize("f", KNOBS, ids=lambda f: f.name)
def test_every_knob_is_documented_with_its_default(f: dataclasses.Field[object]) -> None:
    row = next(line for line in page("cli.md").splitlines() if re.match(rf"\| `{flag_of(f)}[ `]", line))
    if isinstance(f.default, (int, float, str)) and not isinstance(f.default, bool):
        assert row.split("|")[2].strip() == (f.default if isinstance(f.default, str) else f"{f.default:.12g}")


@pytest.mark.parametrize(
    ("name", "documented"),
    [
        ("python.md", OmniDiffusionSamplingParams),
        ("python.md", OmniRequestOutput),
        ("python.md", SamplingParams),
        ("speech.md", SamplingParams),
        ("adding_a_family.md", Family),
    ],
)
def test_every_field_is_documented(name: str, documented: type) -> None:
    named = {word for span in code(page(name)) for word in re.findall(r"\w+", span)}
    assert {f.name for f in dataclasses.fields(documented)} <= named


@pytest.mark.parametrize("name", ["architecture.md", "adding_a_family.md"])
def test_files_and_names_in_the_text_exist(name: str) -> None:
    text = page(name)
    files = set(re.findall(r"`([\w/]+\.py)`", text))
    assert files
    for file in files:
        assert place_of(file).is_file(), file
    for file, symbol in re.findall(r"`([\w/]+\.py)` \(`([\w.]+)`\)", text):
        assert symbol in symbols(place_of(file)), (file, symbol)


def place_of(file: str) -> Path:
    """Files are named from the top, or from the package."""
    return ROOT / file if (ROOT / file).is_file() else ROOT / "polymux" / file


def symbols(file: Path) -> set[str]:
    """Functions and classes of a file; methods also as Class.method."""
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, definitions):
            found.add(node.name)
            found |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, definitions)}
    return found


@pytest.mark.parametrize("file", PAGES, ids=lambda file: file.name)
def test_links_lead_somewhere(file: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", file.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        other = file.parent / path if path else file
        if other.name in LATER and not other.exists():
            continue
        assert other.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.*)", other.read_text(encoding="utf-8"), re.M)
            assert anchor in {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}, target


def test_every_page_is_in_the_index() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert {p.name for p in DOCS.glob("*.md")} <= set(re.findall(r"\(docs/([\w.]+)\)", readme))


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_the_changelog_begins_with_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## \[(.+?)\]", text, re.M)
    assert next(v for v in versions if v != "Unreleased") == VERSION
