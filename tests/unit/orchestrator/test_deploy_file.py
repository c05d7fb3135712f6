"""The deploy file: what it says holds, what it cannot say is refused by its path, and what is printed can be read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from orchestrator_harness import Harness, MakeStage, run, started

from polymux.cli.deploy_config import effective
from polymux.cli.main import main
from polymux.config import EngineConfig
from polymux.errors import ConfigError
from polymux.orchestrator.defaults import check_defaults, described, with_defaults
from polymux.orchestrator.deploy import GROUPS
from polymux.orchestrator.orchestrator import Orchestrator
from polymux.orchestrator.plan import StagePlan, devices_of, plan_of
from polymux.request import Capabilities, Finished, OmniDiffusionSamplingParams, Request, SamplingParams

Plan = Callable[..., tuple[StagePlan, ...]]


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A model of two stages, by its word."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["DiaForConditionalGeneration"]}))
    return str(tmp_path)


@pytest.fixture
def plan(tmp_path: Path, model: str) -> Plan:
    def make(text: str, **flags: Any) -> tuple[StagePlan, ...]:
        file = tmp_path / "deploy.yaml"
        file.write_text(text)
        return plan_of(EngineConfig.from_flat(**{"model": model, "deploy_config": str(file)} | flags))

    return make


TWO = """
split_stages: true
async_chunk: false
stages:
  - {stage_id: 1, devices: "cuda:1, cuda:2", dtype: fp32}
  - stage_id: 0
    num_replicas: 3
    data_parallel_policy: round-robin
    max_num_seqs: 4
    default_sampling_params: {temperature: 1.5, extra_args: {a: 1}}
"""


def test_what_it_says_holds(plan: Plan) -> None:
    first, second = plan(TWO, num_threads=2, dtype="bf16", max_num_seqs=9)
    assert [stage.name for stage in (first, second)] == ["tokens", "codec"]
    assert [stage.config.stage for stage in (first, second)] == [0, 1]
    for stage in (first, second):
        stages = stage.config.stages
        assert (stages.split_stages, stages.async_chunk, stages.deploy_config) == (True, False, None)
        assert stage.config.device.num_threads == 2  # of all
    assert (first.config.scheduler.max_num_seqs, second.config.scheduler.max_num_seqs) == (4, 9)
    assert (first.config.model.dtype, second.config.model.dtype) == ("bf16", "fp32")
    assert (first.replicas, second.replicas) == (3, 2)
    assert devices_of(first.config) == ["auto:0", "auto:1", "auto:2"]
    assert devices_of(second.config) == ["cuda:1", "cuda:2"]
    policies = [stage.config.replicas.data_parallel_policy for stage in (first, second)]
    assert policies == ["round-robin", "least-queue-length"]
    assert first.defaults == {"temperature": 1.5, "extra_args": {"a": 1}}


def test_overrides_count_more_than_the_file_and_the_file_more_than_flags(plan: Plan) -> None:
    overrides = {
        "0": {"max_num_seqs": 6, "default_sampling_params": {"top_k": 5, "temperature": 1.1}},
        "1": {"devices": ["cpu"]},
    }
    first, second = plan(TWO, max_num_seqs=9, device="cuda:7", stage_overrides=overrides)
    assert first.config.scheduler.max_num_seqs == 6
    assert first.defaults == {"temperature": 1.1, "extra_args": {"a": 1}, "top_k": 5}
    assert devices_of(first.config) == ["cuda:7"] * 3
    assert devices_of(second.config) == ["cpu"]


def test_one_stage_is_a_graph_too(plan: Plan) -> None:
    (only,) = plan("stages: [{stage_id: 0, devices: [cpu, cpu]}]", model="demo")
    assert (only.name, only.replicas, devices_of(only.config)) == ("model", 2, ["cpu", "cpu"])
    assert plan("", model="demo") == plan_of(EngineConfig.from_flat(model="demo"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stage: []", r"stage=\[\]: is no key here; known are stages, split_stages"),
        ("stages: 3", "stages=3: must be a list"),
        ("stages: [3]", r"stages\[0\]=3: must have keys"),
        ("stages: [{}]", r"stages\[0\].stage_id=null: must be the number of a stage"),
        ("stages: [{stage_id: true}]", r"stages\[0\].stage_id=true"),
        ("stages: [{stage_id: 0}, {stage_id: 0}]", r"stages\[1\].stage_id=0: this stage stands there already"),
        ("stages: [{stage_id: 2, dtype: fp32}]", r"stages\[0\].dtype: the model has 2 stages here"),
        ("stages: [{stage_id: 0, max_seqs: 3}]", r"stages\[0\].max_seqs=3: is no key here; known are stage_id, dev"),
        ("stages: [{stage_id: 0, max_queue: 3}]", r"stages\[0\].max_queue=3: is no key here"),
        ("stages: [{stage_id: 0, max_num_seqs: many}]", r"max_num_seqs: max_num_seqs='many': Expected `int"),
        ("stages: [{stage_id: 0, max_num_seqs: 0}]", r"stages\[0\].max_num_seqs: .* must be at least 1"),
        ("stages: [{stage_id: 0, dtype: int8}]", r"stages\[0\].dtype: dtype='int8': allowed are auto, bf16"),
        ("stages: [{stage_id: 1, max_num_seqs: 3}]", r"stages\[0\].max_num_seqs=3: does not act on a stage that"),
        ("stages: [{stage_id: 0, devices: 3}]", r"stages\[0\].devices=3: Expected"),
        ("stages: [{stage_id: 0, devices: [cpu, cpu], num_replicas: 3}]", r"stages\[0\].devices: .*2 devices for 3"),
        ("stages: [{stage_id: 0, devices: []}]", r"stages\[0\].devices: devices: no device is named"),
        ("stages: [{stage_id: 0, devices: 'gpu7'}]", r"stages\[0\].devices: devices='gpu7': allowed are auto, auto:N"),
        ("stages: [{stage_id: 0, num_replicas: 0}]", r"stages\[0\].num_replicas: .*must be at least 1"),
        ("stages: [{stage_id: 0, data_parallel_policy: best, num_replicas: 2}]", "allowed are least-queue-length"),
        ("stages: [{stage_id: 0, default_sampling_params: 3}]", r"stages\[0\].default_sampling_params=3: must have"),
        ("stages: [{stage_id: 0, default_sampling_params: {heat: 3}}]", r"params.heat=3: is no sampling parameter"),
        ("stages: [{stage_id: 0, default_sampling_params: {top_k: x}}]", r"params.top_k='x': Expected `int"),
        ("stages: [{stage_id: 1, default_sampling_params: {top_k: 3}}]", "requests come to stage 0"),
        ("stages: [{stage_id: 0, enable_cpu_offload: true, enable_layerwise_offload: true}]", "exclude each other"),
        ("async_chunk: 3", "async_chunk=3: Expected `bool"),
        ("stage_connector: pigeon", "allowed are auto, shared-memory, tcp"),
        ("a: 1\na: 2", "not valid YAML: line 3, column 1: 'a' stands twice"),
        ("x: {<<: {a: 1}, <<: {a: 2}}", "not valid YAML: line 2, column 17: '<<' stands twice"),
        ("a: [", "not valid YAML: line 2, column 5: expected the node content"),
        ("stages: [{<<: 3}]", r"not valid YAML: line 2, column 15: << brings in keys and values .* an alias"),
        ("stages: [{<<: [{a: 1}, 3]}]", r"not valid YAML: line 2, column 15: << brings in"),
        ("stages: [{<<: *first}]", r"not valid YAML: line 2, column 15: found undefined alias 'first'"),
        ("a: 2020-02-31", "not valid YAML: day is out of range"),
        ("a: !!bool maybe", "not valid YAML"),
        ("- 1", "must hold keys and values"),
        ("[[[" * 4000, "not valid YAML"),
    ],
)  # fmt: skip
def test_what_it_cannot_say(plan: Plan, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        plan("split_stages: true\n" + text if not text.startswith(("[", "-")) else text)
    assert caught.value.param in ("deploy_config", "stage_connector")


def test_anchors_and_merge_keys(plan: Plan) -> None:
    """What is merged may be written anew beside it, also where what is merged has merged something itself."""
    text = """
stages:
  - &first {stage_id: 0, dtype: fp32, default_sampling_params: &params {top_k: 3}}
  - {<<: *first, stage_id: 1, dtype: bf16, default_sampling_params: {}}
"""
    first, second = plan("split_stages: true" + text)
    assert (first.config.model.dtype, second.config.model.dtype) == ("fp32", "bf16")
    assert first.defaults == {"top_k": 3}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"x": {}}, "stage_overrides.x={}: must be named by the number of a stage"),
        ({"0": 3}, "stage_overrides.0=3: must be an object"),
        ({"0": {"depth": 3}}, "stage_overrides.0.depth=3: is no key here"),
        ({"0": {"max_num_seqs": 0}}, "stage_overrides.0.max_num_seqs: .*at least 1"),
        ({"1": {"dtype": "fp32"}}, "stage_overrides.1.dtype: the model has 1 stages here.*split_stages"),
        ({"0": {"dtype": "fp32"}, "00": {"dtype": "bf16"}}, "stage_overrides.00=.*: must be named by the number"),
        ({"9" * 5000: {}}, "must be named by the number"),
    ],
)
def test_what_overrides_cannot_say(model: str, overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        plan_of(EngineConfig.from_flat(model=model, stage_overrides=overrides))
    assert caught.value.param == "stage_overrides"


@pytest.mark.parametrize(
    "knobs",
    [
        {"use_hsdp": True, "cfg_parallel_size": 2},
        {"lora_scale": 0.5, "lora_path": ["a"]},
        {"dlo_resident_layers": 1, "enable_layerwise_offload": True},
    ],
)
def test_a_key_may_stand_before_the_one_that_it_needs(knobs: dict[str, Any]) -> None:
    one, other = (
        plan_of(EngineConfig.from_flat(model="demo", stage_overrides={"0": k})) for k in (knobs, reverse(knobs))
    )
    assert one == other


def reverse(knobs: dict[str, Any]) -> dict[str, Any]:
    return dict(reversed(knobs.items()))


def test_a_key_that_does_not_go_with_a_flag_is_named(plan: Plan) -> None:
    with pytest.raises(
        ConfigError, match=r"stages\[0\].quantization: --tensor-parallel-size and --quantization exclude"
    ):
        plan("stages: [{stage_id: 0, dtype: fp32, quantization: int8}]", model="demo", tensor_parallel_size=2)


@pytest.mark.parametrize("devices", ["cuda:0,cuda:2", "cuda:2,cuda:2", "cpu,cpu", "cuda:4, cuda"])
def test_devices_of_replicas_on_several_ranks(devices: str) -> None:
    replicas = {"data_parallel_size": 2, "devices": (devices,)}
    (stage,) = plan_of(EngineConfig.from_flat(model="demo", cfg_parallel_size=2, **replicas))
    assert ",".join(devices_of(stage.config)) == devices.replace(" ", "")


def test_replicas_that_would_share_some_of_their_gpus(plan: Plan) -> None:
    message = "devices='cuda:1,cuda:0': each replica takes 2 GPUs .* two of them would take cuda:1"
    with pytest.raises(ConfigError, match=message):
        plan("stages: [{stage_id: 0, devices: [cuda:1, cuda:0]}]", model="demo", cfg_parallel_size=2)
    with pytest.raises(ConfigError, match=message):
        devices = ("cuda:1", "cuda:0")
        plan("stages: [{stage_id: 0, cfg_parallel_size: 2}]", model="demo", data_parallel_size=2, devices=devices)


def test_stages_run_on_one_rank(model: str) -> None:
    with pytest.raises(ConfigError, match="--ring-degree and --split-stages exclude each other"):
        plan_of(EngineConfig.from_flat(model=model, split_stages=True, ring_degree=2))


def test_a_flag_and_the_file_that_contradict_each_other(plan: Plan) -> None:
    with pytest.raises(ConfigError, match="stage_connector='tcp': --stage-connector says 'shared-memory'"):
        plan("split_stages: true\nstage_connector: tcp", stage_connector="shared-memory")


def test_a_file_that_is_not_there(model: str) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        plan_of(EngineConfig.from_flat(model=model, deploy_config="/no/such/file"))


RAY = "stages: [{stage_id: 0, worker_backend: ray, num_replicas: 2, devices: [cuda, cuda]}]"


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        (TWO, {"device": "cpu"}),
        ("", {}),
        ("", {"device": "cpu", "merge_decoding": False, "vocoder": "a"}),
        ("stages: [{stage_id: 0, lora_path: [a]}]", {"model": "demo", "device": "cuda:3"}),
        (RAY, {"model": "demo"}),
        ("", {"model": "demo", "worker_backend": "ray", "device": "cpu", "data_parallel_size": 2}),
        ("", {"model": "demo", "data_parallel_size": 2, "cfg_parallel_size": 2}),
        ("", {"model": "demo", "diffusers_load_kwargs": {"a": None}, "gpu_memory_limit_gib": "auto"}),
    ],
)
def test_what_is_printed_says_the_same(
    plan: Plan, model: str, tmp_path: Path, text: str, flags: dict[str, Any]
) -> None:
    flags = {"model": model, "num_threads": 3} | flags
    before = plan(text, **flags)
    file = str(tmp_path / "deploy.yaml")
    printed = effective(EngineConfig.from_flat(deploy_config=file, **flags))
    assert isinstance(yaml.safe_load(printed), dict)
    after = plan(printed, model=flags["model"])
    for old, new in zip(before, after, strict=True):
        assert (old.name, old.defaults, old.replicas) == (new.name, new.defaults, new.replicas)
        assert devices_of(old.config) == devices_of(new.config)
        for group in {*GROUPS} - {"device", "replicas"}:  # which say the same in other words
            assert getattr(old.config, group) == getattr(new.config, group)
        assert old.config.device.num_threads == new.config.device.num_threads


@pytest.mark.parametrize(
    ("architecture", "settings", "message"),
    [
        (None, {"merge_decoding": True}, "--merge-decoding acts only on models of transformers"),
        (None, {"voice_path": "a"}, "--voice-path acts only on models that speak"),
        ("VitsModel", {"vocoder": "a"}, "vocoder: a vits model has its own"),
        ("VitsModel", {"decoding": "paged"}, "--decoding acts only on models whose answers go on together"),
        ("WhisperForConditionalGeneration", {"quantization": "int8"}, "acts only on pipelines of diffusers"),
        ("Qwen3ForCausalLM", {"lora_path": ["a"]}, "acts only on pipelines of diffusers"),
        ("StableDiffusion3Pipeline", {"cache_backend": "pab"}, "it is not validated for the family sd3; no cache"),
        ("PixArtSigmaPipeline", {"lora_path": ["a"]}, "--lora-path: PixArtSigmaPipeline takes no LoRA"),
    ],
)
def test_settings_that_cannot_act_are_neither_printed_nor_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], architecture: str | None, settings: dict[str, Any], message: str
) -> None:
    index = {"_class_name": architecture} if architecture and architecture.endswith("Pipeline") else None
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    if index is not None:
        (tmp_path / "model_index.json").write_text(json.dumps(index))
    model, (name, value) = str(tmp_path) if architecture else "demo", *settings.items()
    words = [value] if isinstance(value, str) else value if isinstance(value, list) else []
    assert main(["deploy-config", model, f"--{name.replace('_', '-')}", *words]) == 2
    said = capsys.readouterr()
    assert message in said.err and not said.out
    file = tmp_path / "deploy.yaml"
    file.write_text(yaml.safe_dump({"stages": [{"stage_id": 0} | settings]}))
    with pytest.raises(ConfigError, match=rf"stages\[0\]\.{name}: .*{message}"):
        plan_of(EngineConfig.from_flat(model=model, deploy_config=str(file)))


def test_the_command(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["deploy-config", model, "--split-stages", "--data-parallel-size", "2"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("# 0: tokens, 1: codec\n")
    data = yaml.safe_load(said)
    assert [stage["devices"] for stage in data["stages"]] == [["auto:0", "auto:1"]] * 2
    assert main(["deploy-config", "demo", "--split-stages"]) == 2
    assert "has one stage only" in capsys.readouterr().err
    assert main(["deploy-config"]) == 2
    assert main(["deploy-config", "/nonexistent"]) == 1
    assert main(["deploy-config", "no/such/model"]) == 1


SPEAKS = Capabilities(
    family="f", pipeline="P", modality="audio", arguments=("prompt", "temperature", "top_k"), required=("prompt",),
    media={}, samples=True,
)  # fmt: skip


def test_defaults_fill_what_a_request_leaves_open() -> None:
    asked = Request(request_id="1", prompt="a", sampling=SamplingParams(top_k=3))
    filled = with_defaults(asked, {"top_k": 9, "temperature": 0.5, "seed": 4}, SPEAKS)
    assert filled.sampling == SamplingParams(top_k=3, temperature=0.5, seed=4)
    plain = Request(request_id="1", prompt="a", params=OmniDiffusionSamplingParams(seed=5))
    assert with_defaults(plain, {"top_k": 9, "seed": 4}, SPEAKS).sampling == SamplingParams(seed=5, top_k=9)
    assert with_defaults(asked, {}, SPEAKS) is asked


@pytest.mark.parametrize(
    ("asked", "defaults", "filled"),
    [
        ({"temperature": 0}, {"temperature": 1.3, "top_k": 45, "do_sample": True, "seed": 2}, {"seed": 2}),
        ({"do_sample": False}, {"temperature": 1.3, "top_k": 45}, {}),
        ({"top_k": 3}, {"do_sample": False}, {}),
        ({"top_k": 3}, {"temperature": 0}, {}),
        ({"temperature": 0.5}, {"top_k": 45}, {"top_k": 45}),
        ({"speaker_embedding": (0.5,)}, {"voice": "ann", "speed": 2.0}, {"speed": 2.0}),
        ({"voice": "ben"}, {"speaker_embedding": [0.5]}, {}),
        ({"seconds": 3.0}, {"max_new_tokens": 9}, {}),
        ({"extra_args": {"a": 1}}, {"extra_args": {"a": 2, "b": 3}}, {"extra_args": {"a": 1, "b": 3}}),
    ],
)
def test_a_default_does_not_contradict_what_a_request_says(
    asked: dict[str, Any], defaults: dict[str, Any], filled: dict[str, Any]
) -> None:
    request = Request(request_id="1", prompt="a", sampling=SamplingParams(**asked))
    assert with_defaults(request, defaults, SPEAKS).sampling == SamplingParams(**(asked | filled))


def test_a_text_that_says_who_speaks_and_noise_that_is_given_have_no_defaults() -> None:
    marks = msgspec.structs.replace(SPEAKS, speaker_marks=("[S1]", "[S2]"))
    for prompt, voice in ((" [S2] hi", None), ("hi [S2]", "S1")):
        made = with_defaults(Request(request_id="1", prompt=prompt, sampling=SamplingParams()), {"voice": "S1"}, marks)
        assert made.sampling == SamplingParams(voice=voice)
    draws = msgspec.structs.replace(SPEAKS, samples=False)
    given = Request(request_id="1", prompt="a", generator_state=b"state")
    assert with_defaults(given, {"seed": 4, "num_frames": 2}, draws).params == OmniDiffusionSamplingParams(num_frames=2)
    assert described(draws, {"seed": 4, "height": 32, "top_k": 3}).defaults == {"seed": 4, "height": 32}


@pytest.mark.parametrize(
    ("defaults", "message"),
    [
        ({"top_p": 0.5}, "top_p=0.5: P does not take it"),
        ({"height": 64}, "height=64: P does not take it"),
        ({"temperature": -1.0}, "temperature=-1"),
    ],
)
def test_defaults_that_the_model_does_not_take(defaults: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_defaults(defaults, SPEAKS, EngineConfig.from_flat(model="m").limits)


def test_defaults_reach_the_stage_and_bad_ones_end_it(make_stage: MakeStage, tmp_path: Path) -> None:
    file = tmp_path / "deploy.yaml"

    async def good() -> None:
        file.write_text("stages: [{stage_id: 0, num_replicas: 2, default_sampling_params: {height: 32, seed: 5}}]")
        async with started(make_stage, deploy_config=str(file)) as h:
            assert len(h.stages) == 2
            last = (await h.ask("1", width=16))[-1]
            assert isinstance(last, Finished)
            assert (last.seeds, last.outputs[0][0].height, last.outputs[0][0].width) == ([5], 32, 16)  # type: ignore[union-attr]

    async def bad() -> None:
        file.write_text("stages: [{stage_id: 0, default_sampling_params: {num_frames: 5}}]")
        h = Harness(make_stage, deploy_config=str(file))
        with pytest.raises(ConfigError, match="num_frames=5: FakePipeline does not take it"):
            await h.orchestrator.start()
        assert h.orchestrator.status == "dead"

    run(good())
    run(bad())


def test_it_is_read_before_anything_is_started(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        Orchestrator(EngineConfig.from_flat(model="m", deploy_config=str(tmp_path / "none")))
