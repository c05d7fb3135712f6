"""Train the demo model from nothing: `python -m training.train --minutes 8 --out DIR`.

Renders scenes, trains the autoencoder, then text encoder and denoiser, exports the pipeline, scores it. Stages share
the time given; with --vae-steps and --flow-steps they take that many steps instead, which is repeatable. Started again
with the same --work, a run goes on from its last checkpoint. One GPU; a CPU does for toy sizes (--toy).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import diffusers as D
import torch
import torch._dynamo

from training import check, components, evaluate, export, pool, stage_flow, stage_lora, stage_vae
from training.run import Pace, Run, sheet

TOY = components.Sizes(layers=2, heads=2, text_width=64, text_layers=1, text_heads=2, text_mlp=64, vae_base=8)
VAE_SHARE = 0.3  # of the training time
RESERVE = 90.0  # seconds for export and scores, of --minutes


def _arguments() -> argparse.Namespace:
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--out", type=Path, required=True, help="where the results go")
    a.add_argument("--work", type=Path, default=Path(tempfile.gettempdir(), "demo-training"), help="for checkpoints")
    a.add_argument("--minutes", type=float, default=8.0, help="for everything, start to end")
    a.add_argument("--vae-steps", type=int, default=0, help="instead of a share of the time")
    a.add_argument("--flow-steps", type=int, default=0, help="instead of the rest of the time")
    a.add_argument("--seed", type=int, default=1)
    a.add_argument("--scenes", type=int, default=400_000)
    a.add_argument("--batch", type=int, default=1024, help="of the denoiser")
    a.add_argument("--vae-batch", type=int, default=128)
    a.add_argument("--number", type=int, default=150, help="held-out prompts of each kind")
    a.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    a.add_argument("--lora", choices=["outline"], help="train this style adapter on --model instead of a model")
    a.add_argument("--model", type=Path, default=Path("polymux/demo_model"), help="the finished model for --lora")
    a.add_argument("--toy", action="store_true", help="tiny widths, to try the script on a CPU")
    a.add_argument("--eager", action="store_true", help="without torch.compile")
    return a.parse_args()


def _pace(run: Run, args: argparse.Namespace, share: float, steps: int) -> Pace:
    reserve = 0 if args.toy else RESERVE / 3 if args.lora else RESERVE
    left = args.minutes * 60 - reserve - run.elapsed()
    return Pace(seconds=max(left * share, 1.0), steps=steps)


def _autoencoder(pipe: D.QwenImagePipeline, data: pool.Pool, run: Run, args: argparse.Namespace) -> dict[str, float]:
    done = run.work / "vae.done"
    if not done.exists():
        stage_vae.train(pipe.vae, data, run, _pace(run, args, VAE_SHARE, args.vae_steps), args.vae_batch)
        done.touch()
    else:
        state = run.load("vae")
        if state is None:
            raise FileNotFoundError(f"{run.work} has vae.done but no vae.pt: remove the folder and start again")
        pipe.vae.load_state_dict(state["model"])
    quality, pictures = stage_vae.fidelity(pipe.vae, data, run)
    sheet(pictures, run.out / "autoencoder.png", 8)
    return quality


def _scores(run: Run, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Scores of the saved pipeline, logged as they come: the time may end before they do."""
    pipe = export.load(folder, run.device)
    batch = 4 if run.device.type == "cpu" else 150
    report = evaluate.evaluate(pipe, run.out, evaluate.Setting(args.number, batch), run.log)
    if not args.toy:
        report["two things, all right"] = evaluate.sweep(pipe, 100, batch)
    return report


def _fast_math(run: Run) -> None:
    if run.compiled:
        torch._dynamo.config.suppress_errors = True  # what cannot be compiled runs eagerly
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for every mask


def _train_model(pipe: D.QwenImagePipeline, data: pool.Pool, run: Run, args: argparse.Namespace) -> dict[str, Any]:
    report: dict[str, Any] = {"autoencoder PSNR, dB": _autoencoder(pipe, data, run, args)}
    stage_vae.measure(pipe.vae, data, run)
    latents = stage_vae.to_latents(pipe.vae, data, run)
    learner = stage_flow.Learner(pipe, run)
    pace = _pace(run, args, 1.0, args.flow_steps)
    stage_flow.train(learner, stage_flow.to_device(data, latents, pipe, run), run, pace, args.batch)
    report["flow steps"] = pace.step

    folder = run.work / "demo_model"
    shutil.rmtree(folder, ignore_errors=True)
    export.save(pipe.to("cpu"), folder)
    export.archive(folder, run.out / "demo_model.tar.xz")
    report["bytes"] = components.size_in_bytes(folder)
    run.log(f"exported {report['bytes']} bytes")
    run.write_curves()
    (run.out / "metrics.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    return {**report, **_scores(run, args, folder)}


def _train_adapter(pipe: D.QwenImagePipeline, data: pool.Pool, run: Run, args: argparse.Namespace) -> dict[str, Any]:
    pace = _pace(run, args, 1.0, args.flow_steps)
    stage_lora.train(pipe, data, run, pace, args.batch)
    stage_lora.save(pipe, run.out)
    run.write_curves()
    scores = stage_lora.evaluate_style(args.model, run.out, run.out, args.number, run.device)
    return {"flow steps": pace.step, **scores}


def main() -> None:
    args = _arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    args.work.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    found = check.differences()
    if found.worst() > 1e-4:
        raise RuntimeError(f"the fast forwards differ from the libraries' with these versions: {found}")
    sizes = TOY if args.toy else components.Sizes()
    pipe = export.load(args.model) if args.lora else components.pipeline(sizes, args.seed)
    around = pool.template(pipe.prompt_template_encode)
    data = pool.build(args.scenes, args.seed, args.workers, around)  # forks, hence before CUDA
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    run = Run(args.out, args.work, device, args.seed, device.type == "cuda" and not args.eager, began)
    _fast_math(run)
    run.log(f"{len(data.canvas)} scenes by {args.workers} processes; torch {torch.__version__} on {device}")
    for name in ("vae", "text_encoder", "transformer"):
        component = pipe.components[name].to(device)
        run.log(f"{name}: {sum(p.numel() for p in component.parameters()) / 1e6:.2f} M parameters")

    report: dict[str, Any] = {"arguments": {k: str(v) for k, v in vars(args).items()}}
    report |= (_train_adapter if args.lora else _train_model)(pipe, data, run, args)
    report["seconds"] = round(run.elapsed())
    (args.out / "metrics.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    run.log(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
