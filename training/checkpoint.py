"""What a later run needs to go on from this one, in few and small files beside the results.

`parts.pt` holds autoencoder and text encoder in bf16, as they will be exported, each from when its stage is done.
`flow-0.pt` and `flow-1.pt` hold halves of the denoiser, averaged weights in fp32. The optimizer starts afresh and warms
up again, which costs some hundred steps of tens of thousands.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers as D
import torch

from training.run import Run

_LATENTS = ("latents_mean", "latents_std")


def _write(state: dict[str, Any], path: Path) -> None:
    """Complete or not there at all."""
    torch.save(state, path.with_suffix(".part"))
    path.with_suffix(".part").replace(path)


def _read(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state


@torch.no_grad()
def round_off(module: torch.nn.Module) -> None:
    """To the numbers that the export will hold, so that what is trained on them stays right."""
    for p in module.parameters():
        p.copy_(p.to(torch.bfloat16))


PARTS = ("vae", "text_encoder")


def save_parts(pipe: D.QwenImagePipeline, run: Run, names: tuple[str, ...] = PARTS) -> None:
    weights = {
        name: {k: v.to(torch.bfloat16) if v.is_floating_point() else v for k, v in component.state_dict().items()}
        for name, component in ((name, pipe.components[name]) for name in names)
    }
    latents = {name: list(pipe.vae.config[name]) for name in _LATENTS}
    _write({"weights": weights, "latents": latents, "curves": run.curves}, run.out / "parts.pt")


def load_parts(pipe: D.QwenImagePipeline, run: Run, folder: Path) -> set[str]:
    """The names of those that were there."""
    if not (folder / "parts.pt").exists():
        return set()
    state = _read(folder / "parts.pt")
    for name, weights in state["weights"].items():
        pipe.components[name].load_state_dict(weights)
    pipe.vae.register_to_config(**state["latents"])
    run.curves.update(state["curves"])
    return set(state["weights"])


def save_flow(pipe: D.QwenImagePipeline, run: Run, steps: int) -> None:
    halves: list[dict[str, torch.Tensor]] = [{}, {}]
    for name, value in sorted(pipe.transformer.state_dict().items(), key=lambda item: -item[1].numel()):
        lighter = min(halves, key=lambda half: sum(v.numel() for v in half.values()))
        lighter[name] = value.cpu()
    for number, half in enumerate(halves):
        _write({"weights": half, "steps": steps, "curves": run.curves}, run.out / f"flow-{number}.pt")


def load_flow(pipe: D.QwenImagePipeline, run: Run, folder: Path) -> int:
    """Steps taken so far, 0 without a checkpoint."""
    if not all((folder / f"flow-{half}.pt").exists() for half in (0, 1)):
        return 0
    states = [_read(folder / f"flow-{half}.pt") for half in (0, 1)]
    pipe.transformer.load_state_dict({k: v for state in states for k, v in state["weights"].items()})
    run.curves.update(states[0]["curves"])
    return int(states[0]["steps"])
