"""Write a tiny checkpoint, load it again, and run its smoke call."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers as D
import torch
from safetensors.torch import save_file

from polymux.errors import ConfigError
from polymux.testing.tiny.inputs import have_torchvision
from polymux.testing.tiny.layout import published_layout
from polymux.testing.tiny.registry import DEFAULT, Ctx, Tensors, Tiny, find
from polymux.testing.tiny.weights import generator

OUTPUTS = ("images", "image", "frames", "audios", "audio", "videos", "video", "sound")  # attributes of pipeline outputs


def make(name: str, out: Path, ctx: Ctx = DEFAULT) -> Path:
    """Write checkpoint `name` into the folder `out/name`, replaced if present. Returns the folder."""
    spec = find(name)
    if spec.needs_torchvision and not have_torchvision():
        raise ConfigError(f"{name} needs torchvision, which cannot be imported (see polymux.testing.torchvision_cpu)")
    target = out / name
    if target.exists():
        shutil.rmtree(target)
    target.mkdir(parents=True)
    torch.manual_seed(ctx.seed)
    built = spec.build(ctx)
    sharding = {"max_shard_size": ctx.shard} if ctx.shard else {}
    for item in built if isinstance(built, list) else [built]:
        takes_sharding = spec.kind != "transformers" or isinstance(item, torch.nn.Module)
        item.save_pretrained(target, **(sharding if takes_sharding else {}))
    if ctx.published:
        published_layout(target)
    return target


def open_pipeline(path: Path, ctx: Ctx, load: Mapping[str, Any], lora: Path | None = None) -> D.DiffusionPipeline:
    """Load a pipeline the plain way, with its adapter if there is one; a `ModularPipeline` where the files say so."""
    if (path / "modular_model_index.json").exists():
        modular = D.ModularPipeline.from_pretrained(path, local_files_only=True, **load)
        modular.load_components(dtype=ctx.dtype)
        return modular
    pipe = D.DiffusionPipeline.from_pretrained(path, dtype=ctx.dtype, local_files_only=True, **load)
    pipe.set_progress_bar_config(disable=True)
    if lora is not None:
        pipe.load_lora_weights(lora)
    return pipe


@torch.no_grad()
def call_pipeline(pipe: D.DiffusionPipeline | D.ModularPipeline, ctx: Ctx, call: Mapping[str, Any]) -> Tensors:
    """Two steps, unless `call` says otherwise, with a seeded CPU generator. Every output as a float tensor."""
    defaults: dict[str, Any] = {"num_inference_steps": 2, "output_type": "pt"}
    if isinstance(pipe, D.ModularPipeline):
        defaults["output"] = [name for name in OUTPUTS if name in pipe.blocks.output_names]
    # lists are copied, since pipelines edit them
    own = {key: list(value) if isinstance(value, list) else value for key, value in call.items()}
    result = pipe(generator=torch.Generator().manual_seed(ctx.seed), **defaults | own)
    tensors = {}
    for key in OUTPUTS:
        value = result.get(key)
        if value is not None:
            for i, item in enumerate(value if isinstance(value, (list, tuple)) else [value]):
                tensors[f"{key}.{i}"] = torch.as_tensor(item).detach().float().contiguous().clone()
    return tensors


def run(spec: Tiny, path: Path, ctx: Ctx, lora: Path | None = None) -> Tensors:
    """The smoke call of the checkpoint in `path`."""
    if spec.kind != "transformers":
        return call_pipeline(open_pipeline(path, ctx, spec.load, lora), ctx, spec.call)
    if spec.run is None:
        raise ConfigError(f"{spec.name} has no smoke call")
    return spec.run(path, ctx)


def component_classes(path: Path) -> dict[str, str]:
    """Class names by component, as the checkpoint's own files say; a flat checkpoint has one, named ""."""
    for index in (path / "model_index.json", path / "modular_model_index.json"):
        if index.exists():
            data = json.loads(index.read_text())
            return {k: "/".join(v[:2]) for k, v in data.items() if isinstance(v, list) and isinstance(v[0], str)}
    config = path / "config.json"
    return {"": ",".join(json.loads(config.read_text()).get("architectures") or [])} if config.exists() else {}


def check(name: str, out: Path, ctx: Ctx, golden: bool = False) -> dict[str, Any]:
    """Make, load again, run. `golden` also writes the output to `out/name.golden.safetensors`."""
    spec = find(name)
    start = time.perf_counter()
    path = make(name, out, ctx)
    made = time.perf_counter()
    tensors = run(spec, path, ctx)
    done = time.perf_counter()
    bad = [key for key, t in tensors.items() if not torch.isfinite(t.float()).all()]
    if golden and tensors:
        save_file({key: t.contiguous() for key, t in tensors.items()}, out / f"{name}.golden.safetensors")
    return {
        "name": name,
        "ok": bool(tensors) and not bad,
        "make_s": round(made - start, 2),
        "run_s": round(done - made, 2),
        "mb": round(sum(p.stat().st_size for p in path.rglob("*") if p.is_file()) / 1e6, 2),
        "classes": component_classes(path),
        "out": {
            key: [list(t.shape), round(float(t.float().mean()), 4), round(float(t.float().std()), 4)]
            for key, t in tensors.items()
        },
        **({"nonfinite": bad} if bad else {}),
    }


def audit(name: str, out: Path, ctx: Ctx, threshold: float = 1e-5) -> dict[str, Any]:
    """Disturb one tensor at a time: which ones does the output of the smoke call not depend on?"""
    spec = find(name)
    if spec.kind != "diffusers":
        raise ConfigError(f"{name} is a {spec.kind} checkpoint; audit knows diffusers pipelines only", param="name")
    pipe = open_pipeline(make(name, out, ctx), ctx, spec.load)
    base = call_pipeline(pipe, ctx, spec.call)
    unused = []
    parameters = [
        (f"{part}/{key}", param.data)
        for part, module in pipe.components.items()
        if isinstance(module, torch.nn.Module)
        for key, param in module.named_parameters()
    ]
    for key, data in parameters:
        old = data.clone()
        noise = torch.randn(old.shape, generator=generator(1, f"audit/{key}"))
        scale = old.float().std().nan_to_num(0.1).clamp(min=0.05)
        data.copy_(old + (0.5 * scale * noise).to(old.dtype))
        moved = max(float((base[k] - v).abs().max()) for k, v in call_pipeline(pipe, ctx, spec.call).items())
        data.copy_(old)
        if moved < threshold:
            unused.append(key)
    return {"name": name, "ok": True, "tensors": len(parameters), "unused": unused}
