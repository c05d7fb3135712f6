"""Components: what they are for, what of them is captured, and that they go back as they were."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from greenlet import greenlet

from polymux.diffusion.component import Component, SessionGreenlet, components_of, role_of
from polymux.errors import ConfigError


class Session(greenlet, SessionGreenlet):  # type: ignore[misc]
    pass


def in_session(body: Callable[[], Any]) -> tuple[Any, list[tuple[str, str]]]:
    """What `body` returns as a session, and the calls that were captured; each is run at once, outside the session."""
    seen: list[tuple[str, str]] = []

    def handler(component: Component, method: str, args: Any, kwargs: Any) -> Any:
        seen.append((component.name, method))
        return greenlet(lambda: component.run(method, component.bind(method, args, kwargs))).switch()

    session = Session(body)
    session.handler = handler
    return session.switch(), seen


class Linear(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.Identity()

    def forward(self, x: Any, scale: float = 2.0, bias: Any = None) -> Any:
        return x * scale + (0 if bias is None else bias)


@pytest.fixture
def attached() -> Iterator[Callable[..., list[Component]]]:
    """Attaches components, and detaches them at the end."""
    made: list[Component] = []

    def attach(**modules: torch.nn.Module) -> list[Component]:
        components = components_of(modules.items())
        for component in components:
            component.attach()
        made.extend(components)
        return components

    yield attach
    for component in made:
        component.detach()


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("transformer", "denoiser"),
        ("transformer_2", "denoiser"),
        ("unet", "denoiser"),
        ("controlnet", "denoiser"),
        ("prior_prior", "denoiser"),
        ("decoder", "denoiser"),
        ("vae", "decoder"),
        ("audio_vae", "decoder"),
        ("vocoder", "decoder"),
        ("vqgan", "decoder"),
        ("text_encoder_3", "encoder"),
        ("image_encoder", "encoder"),
        ("connectors", "encoder"),
        ("safety_checker", "encoder"),
    ],
)
def test_roles_follow_diffusers_names(name: str, role: str) -> None:
    assert role_of(name) == role


def test_the_parts_that_are_no_modules_are_left_out() -> None:
    parts = {"transformer": Linear(), "scheduler": object(), "tokenizer": None, "odd": Linear()}
    made = components_of(parts.items(), denoisers=("odd",))
    assert [(c.name, c.role) for c in made] == [("transformer", "denoiser"), ("odd", "denoiser")]


def test_the_phase_of_a_call() -> None:
    transformer, encoder, vae = components_of({"unet": Linear(), "text_encoder": Linear(), "vae": Linear()}.items())
    assert transformer.phase("forward") == "denoise"
    assert encoder.phase("forward") == "encode"
    assert (vae.phase("decode"), vae.phase("encode"), vae.phase("post_quant.forward")) == ("decode", "encode", "decode")


# Arguments.


class Forms(torch.nn.Module):
    def encode(self, x: Any, /, y: Any, *rest: Any, flag: bool = False, **more: Any) -> Any:
        return x, y, rest, flag, more

    def decode(self, x: Any, y: Any = None, z: Any = 3) -> Any:
        return x, y, z


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((1, 2), {}), ((1,), {"y": 2}), ((1, 2, 3, 4), {"flag": True}), ((1, 2), {"other": 5, "x2": 6}), ((1, 2, 3), {})],
)
def test_a_call_s_arguments_come_back_as_they_were_given(args: Any, kwargs: Any) -> None:
    component = Component("vae", Forms(), "decoder")
    assert component.run("encode", component.bind("encode", args, kwargs)) == Forms().encode(*args, **kwargs)


def test_arguments_are_named_and_a_default_none_is_left_out() -> None:
    component = Component("vae", Forms(), "decoder")
    assert component.bind("decode", (1, None), {"z": None}) == {"x": 1, "z": None}
    assert component.bind("decode", (), {"z": 3, "x": 1}) == {"x": 1, "z": 3}
    assert component.bind("encode", (1, 2), {"a": None}) == {"x": 1, "y": 2, "a": None}
    with pytest.raises(TypeError):
        component.bind("decode", (), {})


# Capture.


def test_outside_a_session_a_module_is_what_it_was(attached: Callable[..., list[Component]]) -> None:
    module = Linear()
    attached(transformer=module)
    assert module(3, bias=1) == 7
    assert inspect.signature(module.forward) == inspect.signature(Linear().forward)
    assert module.forward.__name__ == "forward"


def test_in_a_session_calls_are_captured(attached: Callable[..., list[Component]]) -> None:
    module = Linear()
    attached(transformer=module)
    assert in_session(lambda: module(3, bias=1)) == (7, [("transformer", "forward")])


def test_autoencoders_are_captured_at_encode_and_decode(attached: Callable[..., list[Component]]) -> None:
    module = Forms()
    attached(vae=module)
    result, seen = in_session(lambda: (module.encode(1, 2), module.decode(4)))
    assert result == ((1, 2, (), False, {}), (4, None, 3))
    assert seen == [("vae", "encode"), ("vae", "decode")]


class Deep(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = Linear()
        self.model.inner = Linear()
        self.model.inner.norm = Linear()
        self.model.inner.norm.too_deep = Linear()
        self.blocks = torch.nn.ModuleList([Linear()])

    def forward(self, x: Any) -> Any:
        return self.model(x)


def test_submodules_are_captured_as_deep_as_pipelines_reach(attached: Callable[..., list[Component]]) -> None:
    module = Deep()
    attached(text_encoder=module)
    inner = module.model.inner

    def body() -> Any:
        return module.model(1), inner(1), inner.norm(1), inner.norm.too_deep(1), module.blocks[0](1), module(1)

    result, seen = in_session(body)
    assert result == (2, 2, 2, 2, 2, 2)
    wanted = ["model.forward", "model.inner.forward", "model.inner.norm.forward", "forward"]
    assert seen == [("text_encoder", name) for name in wanted]


# Going back.


def test_detaching_leaves_nothing() -> None:
    module = Deep()
    before = [dict(m.__dict__) for m in module.modules()]
    (component,) = components_of({"text_encoder": module}.items())
    component.attach()
    component.detach()
    assert [dict(m.__dict__) for m in module.modules()] == before
    assert in_session(lambda: module(3)) == (6, [])


def test_a_forward_of_the_instance_s_own_is_used_and_put_back() -> None:
    """Offloading hooks live there."""
    module = Linear()
    add_hook_to_module(module, ModelHook())
    hooked = module.__dict__["forward"]
    (component,) = components_of({"transformer": module}.items())
    component.attach()
    assert in_session(lambda: module(3)) == (6, [("transformer", "forward")])
    component.detach()
    assert module.__dict__["forward"] is hooked
    assert module(3) == 6


def test_a_module_belongs_to_one_engine_at_a_time(attached: Callable[..., list[Component]]) -> None:
    module, other = Linear(), Linear()
    (first,) = attached(transformer=module)
    with pytest.raises(ConfigError, match=r"transformer \(Linear\) already belongs to an engine"):
        components_of({"text_encoder": other, "unet": module}.items())
    assert in_session(lambda: other(1)) == (2, []), "nothing of the second engine stays"
    first.detach()
    attached(unet=module)
    first.detach()  # does nothing to whom the module belongs to now
    assert in_session(lambda: module(1)) == (2, [("unet", "forward")])


def test_one_module_under_two_names_is_one_component(attached: Callable[..., list[Component]]) -> None:
    module = Linear()
    assert [c.name for c in attached(text_encoder=module, text_encoder_2=module)] == ["text_encoder"]
    assert in_session(lambda: module(1)) == (2, [("text_encoder", "forward")])


def test_a_component_inside_another_one() -> None:
    outer = Deep()
    components = components_of({"text_encoder": outer, "transformer": outer.model}.items())
    for component in components:
        component.attach()
    assert in_session(lambda: outer.model(1))[0] == 2
    assert in_session(lambda: outer(1)) == (2, [("text_encoder", "forward")])
    for component in components:
        component.detach()
    assert in_session(lambda: outer(1)) == (2, [])


@pytest.mark.parametrize(
    ("config", "area"),
    [
        ({}, 1),
        ({"patch_size": 2}, 4),
        ({"patch_size": (1, 2, 2)}, 4),
        ({"patch_size": None}, 1),
        ({"patch_size": "two"}, 1),
        ({"all_patch_size": (2,)}, 4),
    ],
)
def test_patch_areas(config: dict[str, Any], area: int) -> None:
    module = Linear()
    module.config = type("Config", (), config)()
    assert Component("transformer", module, "denoiser").patch_area == area
