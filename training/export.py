"""The trained pipeline as a folder that plain diffusers opens, in bf16, and as one archive.

`python -m training.export --work DIR --out FOLDER` makes it from the checkpoints of a run, ended or cut off.
"""

from __future__ import annotations

import argparse
import tarfile
from pathlib import Path

import diffusers as D
import torch

from training import checkpoint, components
from training.run import Run

README = """\
The embedded model (`--model demo`): a small Qwen-Image pipeline, trained from scratch to paint flat
shapes and letters. Made by `training/`; docs/demo_model.md describes it. Do not edit.
"""


def save(pipe: D.QwenImagePipeline, folder: Path) -> None:
    """Writes `folder`; the weights in `pipe` stay as they are, in fp32."""
    for name, component in pipe.components.items():
        if not isinstance(component, torch.nn.Module):
            component.save_pretrained(folder / name)
            continue
        kept = {key: value.detach().clone() for key, value in component.state_dict().items()}
        component.bfloat16().save_pretrained(folder / name)
        component.float().load_state_dict(kept)
    pipe.save_config(folder)
    (folder / "README.md").write_text(README, encoding="utf-8")


def load(folder: Path, device: torch.device | str = "cpu") -> D.QwenImagePipeline:
    """By plain diffusers, computing in fp32, which is what the served model does on a CPU."""
    pipe = D.DiffusionPipeline.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
    if not isinstance(pipe, D.QwenImagePipeline):
        raise TypeError(f"{folder} opened as {type(pipe).__name__}, not as QwenImagePipeline")
    pipe.set_progress_bar_config(disable=True)
    return pipe.to(device)


def archive(folder: Path, path: Path) -> None:
    """A compressed archive whose bytes depend on the folder's contents alone. Weights hardly shrink: quickly, then."""
    with tarfile.open(path, "w:xz", preset=0) as tar:
        for file in sorted(p for p in folder.rglob("*") if p.is_file()):
            info = tar.gettarinfo(file, arcname=f"demo_model/{file.relative_to(folder)}")
            info.mtime, info.uid, info.gid, info.uname, info.gname, info.mode = 0, 0, 0, "", "", 0o644
            with file.open("rb") as data:
                tar.addfile(info, data)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--work", type=Path, required=True, help="the results of a run")
    arguments.add_argument("--out", type=Path, required=True, help="the pipeline's folder")
    args = arguments.parse_args()
    pipe, run = components.pipeline(components.Sizes(), 1), Run(args.work, torch.device("cpu"), 1)
    found, steps = checkpoint.load_parts(pipe, run, args.work), checkpoint.load_flow(pipe, run, args.work)
    if found != set(checkpoint.PARTS) or not steps:
        raise SystemExit(f"{args.work} lacks checkpoints: it has {sorted(found)} and {steps} steps of the denoiser")
    save(pipe, args.out)
    print(f"{args.out}: {components.size_in_bytes(args.out)} bytes, {steps} steps of the denoiser")


if __name__ == "__main__":
    main()
