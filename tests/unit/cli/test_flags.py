"""Every knob has a flag, and every flag reaches the configuration."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Literal

import pytest

from polymux.cli import generate, serve
from polymux.cli.flags import Parser, add_group, flag_of, given
from polymux.cli.input_files import FLAGS
from polymux.config import EngineConfig
from polymux.errors import ConfigError
from polymux.knobs import Checked, build, field_type, groups_of, knob, without_none
from polymux.memory_config import MemoryConfig
from polymux.prompts import request_of
from polymux.server_config import ServerConfig

GROUPS = groups_of(EngineConfig)
ENGINE_KNOBS = [(name, f) for name, group in GROUPS.items() for f in dataclasses.fields(group)]
SERVER_GROUPS = (ServerConfig, *groups_of(ServerConfig).values())
SERVER_KNOBS = [(group, f) for group in SERVER_GROUPS for f in dataclasses.fields(group) if f.metadata]


def another(group: type, f: dataclasses.Field[Any]) -> tuple[list[str], Any]:
    """Words for the command line that give a knob a value other than its default, and that value."""
    kind, flag = without_none(field_type(group, f.name)), flag_of(f)
    if f.metadata["off"]:  # the flag itself is refused
        return [f.metadata["off"]], False
    if kind is bool:
        return [flag if f.metadata["flag"] or not f.default else "--no-" + flag[2:]], not f.default
    if f.metadata["choices"]:
        value: Any = next(choice for choice in f.metadata["choices"] if choice != f.default)
    elif f.name in ("hsdp_shard_size", "block_size"):
        value = 2 if f.name == "hsdp_shard_size" else 32
    elif kind in (int, float, float | Literal["auto"]):
        kind = int if kind is int else float
        value = kind((f.default or 0) + 1)
    elif f.name == "device":
        value = "cuda:3"
    elif f.name == "ray_address":
        value = "10.0.0.1:6379"
    elif kind is str:
        value = "https://another.example" if f.name == "public_url" else "another"
    elif f.name == "cors_allow_origins":
        return [flag, "https://a.example", "null"], ("https://a.example", "null")
    elif f.name == "gguf_file":
        return [flag, "transformer=a.gguf", "transformer_2=b.gguf"], ("transformer=a.gguf", "transformer_2=b.gguf")
    elif f.name == "devices":
        return [flag, "cuda:1,", "cpu"], ("cuda:1", "cpu")
    elif kind == tuple[str, ...]:
        return [flag, "10.0.0.0/8", "::1/128"], ("10.0.0.0/8", "::1/128")
    elif f.name == "diffusion_attention_config":
        value = {"per_role": {"cross": {"backend": "TORCH_SDPA"}}}
    elif f.name == "profiler_config":
        value = {"profiler": "torch", "torch_profiler_dir": "traces"}
    elif f.name == "compilation_config":
        value = {"backend": "eager", "dynamic": None}
    elif f.name == "cache_config":
        value = {"threshold": 0.5}
    elif f.name == "diffusion_quantization_config":
        value = {"transformer": {"method": "int8", "ignored_layers": ["a"]}}
    else:
        value = {"a": [1, None, {"b": "c"}]}
    return [flag, json.dumps(value) if isinstance(value, dict) else str(value)], value


def beside(f: dataclasses.Field[Any]) -> dict[str, Any]:
    """The knobs without which this one is refused: switches, and one path."""
    if f.name in ("lora_scale", "lora_backend"):
        return {"lora_path": ("a-file",)}
    if f.name == "cache_config":
        return {"cache_backend": "first_block"}
    if f.name in ("vae_patch_parallel_size", "text_encoder_tp_size") or "hsdp" in f.name:
        return {"cfg_parallel_size": 2} | ({"use_hsdp": True} if f.name.startswith("hsdp") else {})
    if f.name in ("async_chunk", "stage_connector"):
        return {"split_stages": True}
    if f.name == "ray_address":
        return {"worker_backend": "ray"}
    if f.name == "connector_host":
        return {"split_stages": True, "stage_connector": "tcp"}
    if f.name in ("data_parallel_policy", "devices"):
        return {"data_parallel_size": 2}
    found: dict[str, Any] = {}
    needed = MemoryConfig.NEEDS.get(f.name, ())
    while needed:
        found[needed[0]] = True
        needed = MemoryConfig.NEEDS.get(needed[0], ())
    return found


def switches(knobs: dict[str, Any]) -> list[str]:
    words = []
    for name, value in knobs.items():
        given_words = value if isinstance(value, tuple) else () if value is True else (str(value),)
        words += ["--" + name.replace("_", "-"), *given_words]
    return words


def parser_of(module: Any) -> Parser:
    parser = Parser(prog="polymux")
    module.add_arguments(parser)
    return parser


@pytest.mark.parametrize(("group", "f"), ENGINE_KNOBS, ids=lambda v: getattr(v, "name", v))
def test_every_engine_flag_reaches_the_config_of_serve(group: str, f: dataclasses.Field[Any]) -> None:
    words, value = another(GROUPS[group], f)
    model = [] if f.name == "model" else ["a-model"]
    engine, _ = serve.configs(parser_of(serve).parse([*model, *words, *switches(beside(f))]))
    assert getattr(getattr(engine, group), f.name) == value
    default = EngineConfig.from_flat(model="a-model", **beside(f))
    changed = dataclasses.replace(getattr(engine, group), **{f.name: getattr(getattr(default, group), f.name)})
    assert dataclasses.replace(engine, **{group: changed}) == default  # and changes nothing else


@pytest.mark.parametrize(("group", "f"), SERVER_KNOBS, ids=lambda v: v.name if isinstance(v, dataclasses.Field) else "")
def test_every_server_flag_reaches_the_config(group: type, f: dataclasses.Field[Any]) -> None:
    words, value = another(group, f)
    needed = {"ssl_certfile": "file"} if f.name in ("ssl_keyfile", "ssl_ca_certs") else {}
    words += [word for name, given in needed.items() for word in ("--" + name.replace("_", "-"), given)]
    engine, server = serve.configs(parser_of(serve).parse(["a-model", *words]))
    assert server == build(ServerConfig, {f.name: value, **needed}) != build(ServerConfig, needed)
    assert engine == EngineConfig.from_flat(model="a-model")


@pytest.mark.parametrize(("group", "f"), ENGINE_KNOBS, ids=lambda v: getattr(v, "name", v))
def test_every_engine_flag_works_for_generate(group: str, f: dataclasses.Field[Any]) -> None:
    words, value = another(GROUPS[group], f)
    model = [] if f.name == "model" else ["--model", "a-model"]
    arguments = parser_of(generate).parse(["--prompt", "p", *model, *words, *switches(beside(f))])
    config = build(EngineConfig, given(arguments, EngineConfig))
    assert getattr(getattr(config, group), f.name) == value


GENERATION_FLAGS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "--size": (["64x32"], {"width": 64, "height": 32}),
    "--num-frames": (["9"], {"num_frames": 9}),
    "--fps": (["12.5"], {"fps": 12.5}),
    "--seconds": (["2.5"], {"seconds": 2.5}),
    "--audio-end-in-s": (["2.5"], {"seconds": 2.5}),
    "--steps": (["3"], {"num_inference_steps": 3}),
    "--num-inference-steps": (["3"], {"num_inference_steps": 3}),
    "--seed": (["5"], {"seed": 5}),
    "--num-images": (["2"], {"num_outputs_per_prompt": 2}),
    "--num-outputs": (["2"], {"num_outputs_per_prompt": 2}),
    "--guidance-scale": (["1.5"], {"guidance_scale": 1.5}),
    "--guidance-scale-2": (["1.5"], {"guidance_scale_2": 1.5}),
    "--true-cfg-scale": (["4"], {"true_cfg_scale": 4.0}),
    "--negative-prompt": (["b"], {"negative_prompt": "b"}),
    "--strength": (["0.5"], {"strength": 0.5}),
    "--sigmas": (["1,0.5"], {"sigmas": (1.0, 0.5)}),
    "--timesteps": (["999,1"], {"timesteps": (999.0, 1.0)}),
    "--max-sequence-length": (["77"], {"max_sequence_length": 77}),
    "--enable-frame-interpolation": ([], {"enable_frame_interpolation": True}),
    "--frame-interpolation-exp": (
        ["2", "--enable-frame-interpolation"],
        {"frame_interpolation_exp": 2, "enable_frame_interpolation": True},
    ),
    "--frame-interpolation-scale": (
        ["0.5", "--enable-frame-interpolation"],
        {"frame_interpolation_scale": 0.5, "enable_frame_interpolation": True},
    ),
    "--profile": ([], {"profile": True}),
    "--extra-args": (['{"eta": 0.5}'], {"extra_args": {"eta": 0.5}}),
}


@pytest.mark.parametrize("flag", GENERATION_FLAGS)
def test_every_generation_flag_reaches_the_sampling_params(flag: str) -> None:
    words, expected = GENERATION_FLAGS[flag]
    plain = generate.sampling_params(parser_of(generate).parse(["--prompt", "p"]))
    params = generate.sampling_params(parser_of(generate).parse(["--prompt", "p", flag, *words]))
    assert params == dataclasses.replace(plain, **expected)
    config = EngineConfig.from_flat(model="demo", frame_interpolation_model_path="network.safetensors")
    generate.check_without_model(request_of("p", params, "id"), config)


WRITING_FLAGS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "--max-new-tokens": (["7"], {"max_new_tokens": 7}),
    "--temperature": (["0.5"], {"temperature": 0.5}),
}


@pytest.mark.parametrize("flag", WRITING_FLAGS)
def test_every_flag_for_models_that_write_reaches_their_params(flag: str) -> None:
    words, expected = WRITING_FLAGS[flag]
    assert generate.writing_params(parser_of(generate).parse(["--prompt", "p"])) == {}
    assert generate.writing_params(parser_of(generate).parse(["--prompt", "p", flag, *words])) == expected


def test_no_generation_flag_is_untested() -> None:
    action = next(g for g in parser_of(generate)._action_groups if g.title == "Generation")
    flags = {flag for a in action._group_actions for flag in a.option_strings if flag.startswith("--")}
    media = {"--media", *("--" + name.replace("_", "-") for name in FLAGS)}
    assert flags - {"--prompt", "--output", *media} == {*GENERATION_FLAGS, *WRITING_FLAGS}


def test_help_is_grouped_by_the_configs_docstrings() -> None:
    text = " ".join(parser_of(serve).format_help().split())
    groups = (*GROUPS.values(), *SERVER_GROUPS)
    for group in groups:
        title, _, description = (group.__doc__ or "").partition(": ")
        assert f"{title}: {description}" in text
    for f in (f for group in groups for f in dataclasses.fields(group)):
        if f.metadata:
            assert flag_of(f) in text
            assert " ".join(f.metadata["help"].split()) in text.replace("- ", "-")


def test_percent_signs_in_help_are_shown_as_they_are() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Odd(Checked):
        """Odd: signs"""

        share: int = knob(50, "50% of it")

    parser = Parser(prog="x")
    add_group(parser, Odd)
    assert "50% of it (default: 50)" in parser.format_help()


@pytest.mark.parametrize(
    "text", ["{", "[]", "1", '"a"', "null", '{"a": NaN}', '{"a": {"b": 1, "b": 2}}', "[" * 100_000]
)
def test_json_flags_take_objects_only(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parser_of(serve).parse(["m", "--diffusers-load-kwargs", text])
    assert caught.value.code == 2
    assert "--diffusers-load-kwargs" in capsys.readouterr().err


def test_flags_have_no_abbreviations() -> None:
    with pytest.raises(SystemExit):
        parser_of(serve).parse(["m", "--max-num", "3"])


@pytest.mark.parametrize(("flag", "value"), [("--dlo-use-allgather", True), ("--dlo-no-use-allgather", False)])
def test_a_switch_with_three_states_has_two_flags(flag: str, value: bool) -> None:
    words = ["m", "--enable-distributed-layerwise-offload"]
    assert vars(parser_of(serve).parse([*words, flag]))["dlo_use_allgather"] is value
    assert serve.configs(parser_of(serve).parse(words))[0].memory.dlo_use_allgather is None
    if value:
        with pytest.raises(ConfigError, match="--dlo-use-allgather: one rank has nobody to gather from"):
            serve.configs(parser_of(serve).parse([*words, flag]))
    else:
        assert serve.configs(parser_of(serve).parse([*words, flag]))[0].memory.dlo_use_allgather is False


def test_lists_may_be_given_in_parts() -> None:
    words = ["m", "--api-key", "a", "b", "--api-key", "c"]
    _, server = serve.configs(parser_of(serve).parse(words))
    assert server.access.api_key == ("a", "b", "c")


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        (["--port", "1", "--port", "2"], ["--port"]),
        (["--port", "1", "--port=1"], ["--port"]),
        (["--max-queue", "1", "--port", "1", "--max-queue", "2"], ["--max-queue"]),
        (["--warmup", "--no-warmup"], ["--warmup", "--no-warmup"]),
        (["--restart-stages", "--restart-stages"], ["--restart-stages"]),
        (
            ["--disable-multithread-weight-load", "--disable-multithread-weight-load"],
            ["--disable-multithread-weight-load"],
        ),
        (["--dlo-use-allgather", "--dlo-no-use-allgather"], ["--dlo-use-allgather", "--dlo-no-use-allgather"]),
        (["--diffusers-load-kwargs", "{}", "--diffusers-load-kwargs", "{}"], ["--diffusers-load-kwargs"]),
    ],
)
def test_a_flag_that_is_given_twice_is_refused(
    words: list[str], flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parser_of(serve).parse(["m", *words])
    assert caught.value.code == 2
    assert capsys.readouterr().err == f"polymux: error: argument {' and '.join(flags)}: given twice\n"


def test_two_names_of_one_flag_are_one_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser_of(generate).parse(["--prompt", "p", "--steps", "1", "--num-inference-steps", "2"])
    assert "--steps and --num-inference-steps: given twice" in capsys.readouterr().err


def test_flags_that_collect_may_be_given_again() -> None:
    arguments = parser_of(generate).parse(["--prompt", "p", "--image", "a.png", "--image", "b.png"])
    assert arguments.image == ["a.png", "b.png"]
