"""The rules of the house, held against the source: layers, names, sizes, and what may be done where.

docs/architecture.md says why. A rule that stands in the way is changed here and there, not worked around.
"""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from itertools import combinations

import pytest
from source_tree import ROOT, Module, functions, imports, modules, words, writes_to_imported

import polymux
from polymux import errors
from polymux.cli import main as cli
from polymux.families import all_families, all_generate_families

# From top to bottom; a module imports from rows below its own, and from its own row where that closes no circle.
LAYERS = (
    ("__init__", "testing"),
    ("cli",),
    ("server", "bench"),
    ("omni", "omni_output", "prompts", "loop_thread"),
    ("orchestrator",),
    ("engine",),
    ("diffusion",),
    ("ar",),
    ("interpolation",),
    ("loading",),
    ("models",),
    ("quantization",),
    ("memory", "parallel"),
    ("media", "families", "connector"),
    (
        "validation",
        "conversation",
        "sampling",
        "further_arguments",
        "messages",
        "metrics",
        "logs",
        "config",
        "server_config",
        "decoding_config",
        "memory_config",
        "parcel",
        "stage_config",
        "attention",
        "compilation_config",
        "step_caches",
        "quantization_config",
        "knobs",
        "parallel_config",
        "profiler_config",
        "json_schema",
        "tools",
        "tool_formats",
        "tool_reader",
        "request",
        "profile",
        "spelling",
        "importing",
        "errors",
        "version",
    ),
)
RANK = {unit: rank for rank, row in enumerate(LAYERS) for unit in row}

# They run in the API process; of the engine, only the modules at its border are imported there.
WITHOUT_TORCH = {"cli", *LAYERS[2], *LAYERS[3], "orchestrator", *LAYERS[-2], *LAYERS[-1]}
TENSORS = ("torch", "diffusers", "transformers", "greenlet")

MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 60
LONGER: dict[str, str] = {}  # module or function: why it may be longer

MODELS_MAY_BE_NAMED_IN = ("families", "models", "testing")
# Words in families' names that mean something without a model.
GENERIC = {"audio", "edit", "fill", "image", "img", "inpaint", "layered", "moe", "stable", "step", "video"}
GENERIC |= {"language", "omni"}
SHORTEST_NAME = 3  # letters


def test_every_part_has_a_layer() -> None:
    assert set(RANK) == {module.unit for module in modules().values()}


def test_the_layers_are_those_of_the_documentation() -> None:
    section = (ROOT / "docs" / "architecture.md").read_text().split("\n## Layers\n")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert [set(re.findall(r"`([^`]+)`", row)) for row in rows] == [set(row) for row in LAYERS]


def test_imports_go_down_only() -> None:
    edges = [(m, modules()[name]) for m in modules().values() for name in imports(m)]
    assert not [f"{m.name} imports {other.name}" for m, other in edges if RANK[other.unit] < RANK[m.unit]]


def test_no_two_packages_import_each_other() -> None:
    edges = {(m.unit, modules()[name].unit) for m in modules().values() for name in imports(m)}
    assert not [pair for pair in combinations(sorted(RANK), 2) if pair in edges and pair[::-1] in edges]


def test_no_circle_of_modules() -> None:
    graph = {m.name: set(imports(m, at_run_time=True)) - {m.name} for m in modules().values()}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_the_package_itself_is_for_users() -> None:
    """Inside, names come from the module that defines them."""
    assert not [m.name for m in modules().values() if "polymux" in imports(m)]


def test_the_api_process_imports_no_torch() -> None:
    """The border modules of the engine neither: they are imported before the engine is chosen."""
    borders = ["polymux.engine.base", "polymux.engine.channel", "polymux.engine.process"]
    names = [m.name for m in modules().values() if m.unit in WITHOUT_TORCH and m.file.name != "__main__.py"]
    program = f"import importlib, sys\nfor name in {names + borders}: importlib.import_module(name)\n"
    program += f"print([name for name in {TENSORS} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_the_names_of_models_are_told_from_other_words() -> None:
    assert {"qwen", "image", "qwenimage"} <= words("a QwenImageTransformer2DModel")
    assert {"hidream", "wan", "sdxl"} <= words("HiDream, Wan2_1 and load_sdxl")
    assert "wan" not in words("wanted")


def test_models_are_named_in_families_only() -> None:
    every = [family.name for family in (*all_families(), *all_generate_families())]
    parts = {part.rstrip("0123456789") for name in every for part in re.split(r"[-.]", name)}
    names = {part for part in parts - GENERIC if len(part) >= SHORTEST_NAME}
    names |= {pipeline.lower() for family in all_families() for pipeline in family.pipelines}
    names |= {model.lower() for family in all_generate_families() for model in family.models}
    others = [m for m in modules().values() if m.unit not in MODELS_MAY_BE_NAMED_IN]
    assert not {m.name: found for m in others if (found := names & words(m.text))}


def test_every_file_of_families_is_in_the_registry() -> None:
    shared = {"polymux.families", "polymux.families.base", "polymux.families.graph"}
    shared |= {"polymux.families.step_caches", "polymux.families.video_tokens", "polymux.families.omni_parts"}
    shared |= {"polymux.families.tool_templates", "polymux.families.omni_reading", "polymux.families.omni_thinking"}
    shared |= {"polymux.families.settings", "polymux.families.divisible"}
    files = {m.name for m in modules().values() if m.unit == "families"}
    assert files - shared == set(imports(modules()["polymux.families"])) - shared


def test_a_pipeline_belongs_to_one_family() -> None:
    pipelines = [pipeline for family in all_families() for pipeline in family.pipelines]
    pipelines += [model for family in all_generate_families() for model in family.models]
    assert len(pipelines) == len(set(pipelines))


def test_every_declared_pipeline_has_a_tiny_checkpoint() -> None:
    """So that tests/parity proves what is declared."""
    makers = "\n".join(m.text for name, m in modules().items() if name.startswith("polymux.testing.tiny.makers."))
    pipelines = {pipeline for family in all_families() for pipeline in family.pipelines}
    pipelines |= {model for family in all_generate_families() for model in family.models}
    assert pipelines <= set(re.findall(r"\w+", makers))


def test_files_and_functions_are_short() -> None:
    lengths = {m.name: len(m.text.splitlines()) for m in modules().values()}
    long = {name for name, lines in lengths.items() if lines > MAX_FILE_LINES}
    long |= {name for m in modules().values() for name, lines in functions(m) if lines > MAX_FUNCTION_LINES}
    assert long == set(LONGER)


def test_the_environment_is_read_in_config_only() -> None:
    assert [m.name for m in modules().values() if reads_environment(m)] == ["polymux.config"]


def reads_environment(module: Module) -> bool:
    names: set[str] = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            names.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            names |= {alias.name for alias in node.names}
    return bool(names & {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"})


def test_nothing_imported_is_changed() -> None:
    assert not {m.name: lines for m in modules().values() if (lines := list(writes_to_imported(m)))}


def test_modules_say_what_they_are() -> None:
    assert not [m.name for m in modules().values() if not ast.get_docstring(m.tree)]


def test_dunder_all_is_sorted_and_complete() -> None:
    declared = {m: names for m in modules().values() if (names := dunder_all(m)) is not None}
    assert declared
    for module, names in declared.items():
        assert names == sorted(names, key=lambda name: (not name.isupper(), not name[0].isupper(), name)), module.name
        assert set(names) == public_names(module), module.name


def dunder_all(module: Module) -> list[str] | None:
    for node in module.tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__":
            return list(ast.literal_eval(node.value))
    return None


def public_names(module: Module) -> set[str]:
    """What a package takes from its own modules, for whoever imports the package; and what it defines itself."""
    top = [*module.tree.body, *(inner for node in module.tree.body if isinstance(node, ast.If) for inner in node.body)]
    froms = [node for node in top if isinstance(node, ast.ImportFrom) and str(node.module).startswith("polymux")]
    names = {alias.asname or alias.name for node in froms for alias in node.names}
    names |= {node.name for node in top if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    return {name for name in names if not name.startswith("_") or name == "__version__"}


@pytest.mark.parametrize("name", polymux.__all__)
def test_public_names_are_there(name: str) -> None:
    assert getattr(polymux, name) is not None


def test_the_tree_of_errors_is_the_one_in_its_docstring() -> None:
    """Each class below its base, with the HTTP status or the exit code that it turns into."""
    drawn: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        if found := re.match(r"([ │├└─]*)(\w+Error)\s+(exit code (\d)|\d{3})", line):
            depth, name, code, exit_code = len(found[1]) // 4, found[2], found[3], found[4]
            cls = vars(errors)[name]
            drawn.append((depth, name))
            parents = [n for d, n in drawn if d == depth - 1]
            assert cls.__base__.__name__ == (parents[-1] if parents else "Exception")
            assert exit_code == str(cli.exit_code(cls("x"))) if exit_code else code == str(cls.status)
    classes = {n for n, c in vars(errors).items() if isinstance(c, type) and issubclass(c, errors.PolymuxError)}
    assert sorted(name for _, name in drawn) == sorted(classes)
