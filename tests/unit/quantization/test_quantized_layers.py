"""What a layer computes is what its weight, unpacked by somebody else, would give."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F

from polymux.memory.layout import image_of, let_go
from polymux.quantization.bnb import BnB4, make_plain
from polymux.quantization.formats import FP8, INT4, INT8, MXFP8
from polymux.quantization.gguf import GGUF
from polymux.quantization.layer import Format, PackedLinear, pack_linear, weight_count
from polymux.quantization.rows import quantized_rows

CPU = torch.device("cpu")
FORMATS: list[Format] = [FP8(False), INT8(False), INT4(), BnB4("nf4"), BnB4("fp4")]
DYNAMIC: list[Format] = [FP8(True), INT8(True)]
BITS = {"fp8": 8, "int8": 8, "int4": 4, "nf4": 4, "fp4": 4}


def linear(dtype: torch.dtype = torch.float32, bias: bool = True, width: int = 96) -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(width, 48, bias=bias, dtype=dtype).requires_grad_(False)


def inputs(dtype: torch.dtype = torch.float32, width: int = 96) -> torch.Tensor:
    return torch.randn(3, 5, width, generator=torch.Generator().manual_seed(1)).to(dtype)


def close(one: torch.Tensor, other: torch.Tensor, share: float = 1e-6) -> bool:
    return bool((one - other).abs().max() <= share * other.abs().max())


def name(format: Format) -> str:
    return format.name.partition(",")[0]


@pytest.mark.parametrize("format", FORMATS, ids=name)
@pytest.mark.parametrize("bias", [True, False])
def test_weights_only(format: Format, bias: bool) -> None:
    plain = linear(bias=bias)
    layer = pack_linear(plain, format, CPU)
    assert isinstance(layer, torch.nn.Linear) and layer.weight.dtype == torch.float32
    assert torch.equal(layer(inputs()), F.linear(inputs(), layer.weight, plain.bias))
    assert 0 < (layer.weight - plain.weight).abs().max() < {8: 0.07, 4: 0.3}[BITS[name(format)]] * plain.weight.max()


def test_eight_bits_are_the_nearest_multiples_of_a_row_s_scale() -> None:
    weight = linear().weight
    for format, largest in ((INT8(False), 127.0), (FP8(False), 448.0)):
        scale = (weight.abs().amax(1, keepdim=True) / largest).bfloat16().float()
        codes = (weight / scale).clamp(-largest, largest)
        codes = codes.round() if largest == 127.0 else codes.to(torch.float8_e4m3fn).float()
        assert torch.equal(pack_linear(linear(), format, CPU).weight, codes * scale)


def test_int4_has_a_scale_for_each_group() -> None:
    groups = linear().weight.view(48, 3, 32)
    scale = (groups.abs().amax(-1, keepdim=True) / 7).bfloat16().float()
    expected = ((groups / scale).round().clamp(-7, 7) * scale).view(48, 96)
    assert torch.equal(pack_linear(linear(), INT4(), CPU).weight, expected)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True], ids=["scales", "packed scales"])
def test_four_bits_are_those_of_bitsandbytes(kind: str, nested: bool) -> None:
    from bitsandbytes.nn import Linear4bit

    width = 128  # two blocks: the package unpacks rows that end within one wrongly on a CPU
    theirs = Linear4bit(width, 48, quant_type=kind, compute_dtype=torch.float32, compress_statistics=nested)
    theirs.load_state_dict(linear(width=width).state_dict())
    model = torch.nn.Sequential(theirs).to("cpu").requires_grad_(False)  # where it quantizes
    expected = model(inputs(width=width))
    make_plain(model, torch.float32)
    assert isinstance(model[0], PackedLinear)
    assert close(model(inputs(width=width)), expected)
    if not nested:
        assert torch.equal(pack_linear(linear(width=width), BnB4(kind), CPU).weight, model[0].weight)


@pytest.mark.parametrize("format", [INT4(), BnB4("nf4"), BnB4("fp4")], ids=name)
@pytest.mark.parametrize("width", [96, 128, 160, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_four_bits_are_near_whatever_the_length_of_a_row(format: Format, width: int, dtype: torch.dtype) -> None:
    plain = linear(dtype, width=width)
    if not format.fits(plain):
        pytest.skip("it packs groups of weights of one row")
    apart = pack_linear(plain, format, CPU).weight - plain.weight
    assert apart.float().norm() < 0.15 * plain.weight.float().norm()


@pytest.mark.parametrize("kind", ["Q8_0", "Q5_1", "Q4_0"])
def test_gguf_is_that_of_its_own_package(kind: str) -> None:
    from gguf import GGMLQuantizationType, quants

    number = GGMLQuantizationType[kind]
    packed = quants.quantize(linear().weight.numpy(), number)
    expected = torch.from_numpy(quants.dequantize(packed, number))
    layer = PackedLinear((48, 96), None, torch.float32, GGUF(int(number), kind), {"codes": torch.from_numpy(packed)})
    assert close(layer.weight, expected)
    assert close(layer(inputs()), F.linear(inputs(), expected))


def test_mxfp8_has_powers_of_two() -> None:
    codes = linear().weight.mul(1000).to(torch.float8_e4m3fn)
    exponents = torch.randint(120, 132, (48, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    layer = PackedLinear((48, 96), None, torch.float32, MXFP8(), {"codes": codes.view(torch.uint8), "scale": exponents})
    expected = codes.float().view(48, 3, 32) * (2.0 ** (exponents.float() - 127)).unsqueeze(-1)
    assert torch.equal(layer.weight, expected.view(48, 96))


@pytest.mark.parametrize("format", DYNAMIC, ids=name)
def test_inputs_are_quantized_token_by_token(format: FP8 | INT8) -> None:
    layer, x = pack_linear(linear(), format, CPU), inputs().view(15, 96)
    scale = x.abs().amax(1, keepdim=True) / format.largest
    codes = (x / scale).clamp(-format.largest, format.largest)
    codes = codes.round() if isinstance(format, INT8) else codes.to(torch.float8_e4m3fn).float()
    expected = F.linear((codes * scale).double(), layer.weight.double()).float() + layer.bias
    share = 1e-6 if isinstance(format, INT8) else 2**-8  # its product puts out bf16
    assert close(layer(inputs()), expected.view(3, 5, 48), share)
    assert torch.equal(layer(inputs()[1:2]), layer(inputs())[1:2]), "what else is in the batch does not matter"


def test_one_output_or_one_input() -> None:
    for shape in ((16, 1), (1, 1), (1, 16)):
        odd = torch.nn.Linear(*shape).requires_grad_(False)
        odd.weight.data = torch.randn(1, 16)[:, : shape[0]].expand(shape[1], shape[0])
        for format in (FP8(False), INT8(False), BnB4("nf4")):
            assert pack_linear(odd, format, CPU)(torch.ones(2, shape[0])).shape == (2, shape[1])


def test_a_row_of_zeros() -> None:
    for code, largest in ((torch.int8, 127.0), (torch.float8_e4m3fn, 448.0)):
        codes, scale = quantized_rows(torch.zeros(2, 16), code, largest)
        assert not codes.float().any() and scale.isfinite().all()
    for format in FORMATS:
        layer = linear()
        layer.weight.zero_()
        assert not pack_linear(layer, format, CPU).weight.any(), format


@pytest.mark.parametrize("format", FORMATS, ids=name)
def test_what_is_kept_is_small_and_plain(format: Format) -> None:
    layer = pack_linear(linear(torch.bfloat16), format, CPU)
    parts = {n: p for n, p in layer.named_parameters() if n != "bias"}
    assert all(p.dtype == torch.uint8 and type(p) is torch.nn.Parameter for p in parts.values())
    assert next(layer.parameters()) is layer.bias, "whoever asks the first one for its type gets a type to compute in"
    assert parts["codes"].nbytes == 96 * 48 * BITS[name(format)] // 8
    assert sum(p.nbytes for p in parts.values()) < 96 * 48 * BITS[name(format)] // 8 * 1.3 + 64
    assert weight_count(torch.nn.Sequential(layer)) == 96 * 48 + 48
    before = layer.weight
    layer.to(torch.float32)  # as pipelines cast models
    assert torch.equal(layer.weight, before)
    assert torch.equal(copy.deepcopy(layer)(inputs(torch.float32)), layer(inputs(torch.float32)))


@pytest.mark.parametrize("format", [*FORMATS, *DYNAMIC], ids=lambda f: f.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(format: Format, dtype: torch.dtype) -> None:
    layer = pack_linear(linear(dtype), format, CPU)
    got = layer(inputs(dtype))
    assert got.dtype == dtype
    expected = F.linear(inputs(dtype).float(), layer.weight.float(), layer.bias.float())
    assert close(got.float(), expected, 0.05 if format in DYNAMIC else 2**-7)


@pytest.mark.parametrize("format", FORMATS, ids=name)
def test_shapes_are_known_without_weights(format: Format) -> None:
    real = pack_linear(linear(), format, CPU)
    with torch.device("meta"):
        empty = pack_linear(torch.nn.Linear(96, 48), format, torch.device("meta"))
    shapes = {n: (p.shape, p.dtype) for n, p in real.named_parameters()}
    assert {n: (p.shape, p.dtype) for n, p in empty.named_parameters()} == shapes


@pytest.mark.parametrize("format", [*FORMATS, *DYNAMIC], ids=lambda f: f.name)
def test_a_layer_that_is_not_on_the_device_has_no_result(format: Format) -> None:
    layer = pack_linear(linear(), format, CPU)
    let_go(layer, image_of(layer.named_parameters()), CPU)
    assert layer.weight.shape == (48, 96) and layer.weight.isnan().all() and layer(inputs()).isnan().all()


@pytest.mark.parametrize("format", [*FORMATS, *DYNAMIC], ids=lambda f: f.name)
def test_a_compiler_can_look_into_a_layer(format: Format) -> None:
    layer = pack_linear(linear(), format, CPU)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert close(compiled(inputs()), layer(inputs()), 1e-5)
