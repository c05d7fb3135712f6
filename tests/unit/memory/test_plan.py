"""The plan: what the flags ask for, and the best that fits under a limit."""

from __future__ import annotations

import itertools

import pytest

from polymux.errors import ConfigError
from polymux.memory.plan import ACTIVATIONS, ACTIVATIONS_MOST, GIB, Part, Placement, Plan, plan, size, spread
from polymux.memory_config import MemoryConfig

ENCODER = Part("text_encoder", "encoder", 16 * GIB, (GIB // 2,) * 30)
DENOISER = Part("transformer", "denoiser", 41 * GIB, (GIB * 2 // 3,) * 60)
DECODER = Part("vae", "decoder", GIB // 4)
IMAGE = (ENCODER, DENOISER, DECODER)
VIDEO = (
    Part("text_encoder", "encoder", 11 * GIB, (GIB * 2 // 5,) * 24),
    Part("transformer", "denoiser", 28 * GIB, (GIB * 2 // 3,) * 40),
    Part("transformer_2", "denoiser", 28 * GIB, (GIB * 2 // 3,) * 40),
    DECODER,
)
PLAIN = MemoryConfig()


def hows(made: Plan) -> dict[str, str]:
    return {p.part.name: p.how for p in made.placements}


def usable(limit: int) -> float:
    return limit - min(ACTIVATIONS * limit, ACTIVATIONS_MOST)


def test_without_flags_everything_is_resident() -> None:
    made = plan(PLAIN, IMAGE)
    assert set(hows(made).values()) == {"resident"} and made.strategy == "resident"
    assert made.device_bytes == sum(p.nbytes for p in IMAGE)
    assert made.step_bytes == made.request_bytes == 0


def test_model_level_swaps_encoders_and_denoisers() -> None:
    made = plan(MemoryConfig(enable_cpu_offload=True), VIDEO)
    assert hows(made) == {
        "text_encoder": "swapped",
        "transformer": "swapped",
        "transformer_2": "swapped",
        "vae": "resident",
    }
    assert made.groups == [["text_encoder"], ["transformer"], ["transformer_2"]]
    assert made.device_bytes == 28 * GIB + DECODER.nbytes
    assert made.request_bytes == 67 * GIB and made.step_bytes == 0


def test_a_controlnet_is_in_the_group_of_the_denoisers() -> None:
    parts = (*IMAGE, Part("controlnet", "denoiser", 3 * GIB))
    made = plan(MemoryConfig(enable_cpu_offload=True), parts)
    assert made.groups == [["text_encoder"], ["transformer", "controlnet"]]
    assert made.device_bytes == 44 * GIB + DECODER.nbytes


@pytest.mark.parametrize("flag", ["enable_layerwise_offload", "enable_distributed_layerwise_offload"])
@pytest.mark.parametrize("resident", [0, 1, 30, 59])
@pytest.mark.parametrize("ahead", [0, 2])
def test_layerwise_streams_denoisers_only(flag: str, resident: int, ahead: int) -> None:
    config = MemoryConfig(**{flag: True, "dlo_resident_layers": resident, "dlo_prefetch_layers": ahead})
    made = plan(config, IMAGE)
    assert hows(made) == {"text_encoder": "resident", "transformer": "streamed", "vae": "resident"}
    block = DENOISER.blocks[0]
    assert made.step_bytes == (60 - resident) * block
    assert made.device_bytes == ENCODER.nbytes + DECODER.nbytes + DENOISER.rest + (resident + ahead + 1) * block


def test_layerwise_refuses_what_it_cannot_do() -> None:
    unknown = (Part("unet", "denoiser", GIB), DECODER)
    with pytest.raises(ConfigError, match=r"unet cannot be streamed.*--enable-cpu-offload"):
        plan(MemoryConfig(enable_layerwise_offload=True), unknown)
    with pytest.raises(ConfigError, match="--dlo-resident-layers 60: transformer has 60 blocks"):
        plan(MemoryConfig(enable_layerwise_offload=True, dlo_resident_layers=60), IMAGE)


@pytest.mark.parametrize("parts", [IMAGE, VIDEO])
def test_every_limit_is_kept_or_refused_and_more_memory_never_costs_time(parts: tuple[Part, ...]) -> None:
    costs, refused = [], []
    for gib in range(1, 100):
        limit = gib * GIB
        try:
            made = plan(PLAIN, parts, limit=limit, bandwidth=55e9)
        except ConfigError as error:
            refused.append(gib)
            assert error.param == "gpu_memory_limit_gib" and size(limit) in error.message
            continue
        assert made.device_bytes <= usable(limit)
        costs.append((made.request_bytes + 30 * made.step_bytes, gib))
    assert refused == list(range(1, len(refused) + 1)) and len(refused) < 8
    assert all(more[0] <= less[0] for less, more in itertools.pairwise(costs))
    assert costs[-1][0] == 0


def test_the_limit_that_is_named_when_one_is_refused_works() -> None:
    with pytest.raises(ConfigError) as caught:
        plan(PLAIN, IMAGE, limit=GIB)
    named = float(caught.value.message.rsplit("at least ", 1)[1].removesuffix(" GiB"))
    plan(PLAIN, IMAGE, limit=int((named + 0.1) * GIB))


def test_under_a_limit_the_encoder_gives_way_before_the_denoiser() -> None:
    made = plan(PLAIN, IMAGE, limit=56 * GIB)
    assert hows(made)["transformer"] == "resident"
    assert made.step_bytes == 0 and 0 < made.request_bytes < ENCODER.nbytes  # some of its blocks stay, too


def test_two_denoisers_that_fit_one_at_a_time_are_swapped() -> None:
    made = plan(PLAIN, VIDEO, limit=36 * GIB)
    assert made.strategy == "model-level"


def test_a_model_without_known_blocks_is_swapped_or_refused() -> None:
    parts = (Part("text_encoder", "encoder", 2 * GIB), Part("unet", "denoiser", 5 * GIB), DECODER)
    assert plan(PLAIN, parts, limit=7 * GIB).strategy == "model-level"
    with pytest.raises(ConfigError, match=r"a limit of 5\.0 GiB"):
        plan(PLAIN, parts, limit=5 * GIB)


@pytest.mark.parametrize(("count", "total"), [(0, 5), (1, 1), (1, 5), (2, 5), (3, 5), (30, 60), (59, 60)])
def test_resident_blocks_are_spread(count: int, total: int) -> None:
    places = spread(count, total)
    assert len(set(places)) == count and all(0 <= place < total for place in places)
    gaps = [b - a for a, b in itertools.pairwise([*places, *(p + total for p in places[:1])])]
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_the_line_for_the_log_says_what_and_why_and_at_what_cost() -> None:
    line = plan(MemoryConfig(enable_layerwise_offload=True, dlo_resident_layers=10), IMAGE, bandwidth=55e9).describe()
    assert "\n" not in line
    for words in (
        "layerwise (--enable-layerwise-offload)",
        "on the device: text_encoder 16.0 GiB, vae 0.2 GiB",
        "transformer: 50 of 60 blocks streamed (33.3 GiB)",
        "at least 0.65 s per step at 55 GB/s",
    ):
        assert words in line
    swapped = Plan((Placement(ENCODER, "swapped"),), 3, "why", 50e9).describe()
    assert "swapped in when used: text_encoder 16.0 GiB" in swapped and "0.34 s per request" in swapped
