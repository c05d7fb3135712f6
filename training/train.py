"""Train the demo model from nothing: `python -m training.train --minutes 9 --seed 1 --out DIR`.

Renders scenes, trains the autoencoder, then the text encoder, then the denoiser, exports the pipeline, scores it. They
share the time given; with --vae-steps, --text-steps and --flow-steps they take that many steps instead, which is
repeatable. `--work DIR`, the results of an earlier run, goes on from there: its autoencoder and text encoder stay as
they are and all time goes to the denoiser, unless --vae-share or --vae-steps lets the autoencoder go on first, all of
it or (--decoder-only) without changing the latents that the denoiser knows. One GPU; a CPU does for toy sizes (--toy).
`--smoke` tries everything in a few steps, logs what takes the device's time and exits with 3 where that is too much.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers as D
import torch
import torch.fx.experimental._config
from torch import Tensor

from training import (
    check,
    checkpoint,
    components,
    evaluate,
    export,
    pool,
    stage_flow,
    stage_lora,
    stage_text,
    stage_vae,
)
from training.parse import Parser
from training.run import Pace, Run, sheet
from training.sampling import Sampler
from training.scenes import CANVASES

TOY = components.Sizes(layers=2, heads=2, text_width=64, text_layers=1, text_heads=2, text_mlp=64, vae_base=8)
VAE_SHARE = 0.25  # of the time given, without compilation
TEXT_SHARE = 0.025
SLOW = 0.03  # seconds for a step, in a smoke test
FINISH = 50.0  # seconds for export and scores, of --minutes
SWEEP = 25.0  # seconds that must be left for scores by steps and guidance
SMOKE = {"scenes": 6000, "vae_scenes": 4000, "vae_steps": 60, "text_steps": 40, "flow_steps": 60, "number": 8}
TOY_SMOKE = {"scenes": 60, "vae_scenes": 60, "vae_steps": 6, "text_steps": 6, "flow_steps": 6, "number": 1}


def _arguments() -> argparse.Namespace:
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--out", type=Path, required=True, help="where results and checkpoints go")
    a.add_argument("--work", type=Path, help="the results of an earlier run, to go on from")
    a.add_argument("--minutes", type=float, default=9.0, help="for everything, start to end")
    a.add_argument("--vae-share", type=float, help=f"of the time, 0 to 1; {VAE_SHARE}, but with --work 0")
    a.add_argument("--vae-steps", type=int, default=0, help="instead of a share of the time")
    a.add_argument("--decoder-only", action="store_true", help="of the autoencoder, with --work")
    a.add_argument("--text-steps", type=int, default=0, help="instead of a share of the time")
    a.add_argument("--flow-steps", type=int, default=0, help="instead of the rest of the time")
    a.add_argument("--seed", type=int, default=1)
    a.add_argument("--scenes", type=int, default=400_000)
    a.add_argument("--vae-scenes", type=int, default=200_000)
    a.add_argument("--batch", type=int, default=512, help="pictures in a step of the denoiser")
    a.add_argument("--text-batch", type=int, default=1024, help="captions in a step of the text encoder")
    a.add_argument("--vae-batch", type=int, default=128, help="crops in a step of the autoencoder")
    a.add_argument("--number", type=int, default=100, help="held-out prompts of each kind")
    a.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    a.add_argument("--lora", choices=["outline"], help="train this style adapter on --model instead of a model")
    a.add_argument("--model", type=Path, default=Path("polymux/demo_model"), help="the finished model for --lora")
    a.add_argument("--toy", action="store_true", help="tiny widths, to try the script on a CPU")
    a.add_argument("--smoke", action="store_true", help="a few steps of everything, with profiles")
    a.add_argument("--eager", action="store_true", help="without torch.compile and CUDA graphs")
    args = a.parse_args()
    if args.decoder_only and (args.work is None or not (args.vae_share or args.vae_steps)):
        a.error("--decoder-only goes with --work and --vae-share or --vae-steps")
    if args.vae_share is None:
        args.vae_share = VAE_SHARE if args.work is None else 0.0
    if args.smoke:
        vae_steps = args.vae_steps
        vars(args).update(TOY_SMOKE if args.toy else SMOKE)
        args.vae_steps = args.vae_steps if args.vae_share else vae_steps
    return args


def _seconds(args: argparse.Namespace, share: float) -> float:
    return float(args.minutes * 60 * share)


def _fast_math() -> None:
    torch.fx.experimental._config.use_duck_shape = False  # a square picture says nothing of the next one
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.benchmark_limit = 4  # ways to convolve that are tried
    torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for every mask


def _parts(
    pipe: D.QwenImagePipeline, run: Run, args: argparse.Namespace, pools: dict[str, Callable[[], pool.Pool]]
) -> dict[str, Any]:
    """Autoencoder and text encoder, from an earlier run or trained now."""
    found = set() if args.work is None else checkpoint.load_parts(pipe, run, args.work)
    if found:
        run.log(f"{' and '.join(sorted(found))} from {args.work}")
    if "vae" not in found or args.vae_share or args.vae_steps:
        pictures = pools["vae"]()
        run.log(f"{len(pictures.canvas)} scenes for the autoencoder")
        rate = stage_vae.LATER_RATE if "vae" in found else stage_vae.PEAK_RATE
        plan = stage_vae.Plan(args.vae_batch, rate, args.decoder_only)
        stage_vae.train(pipe.vae, pictures, run, Pace(_seconds(args, args.vae_share), args.vae_steps), plan)
        checkpoint.round_off(pipe.vae)
        if not args.decoder_only:
            stage_vae.measure(pipe.vae, pictures, run)
    if "text_encoder" in found:
        checkpoint.save_parts(pipe, run)
        return {}
    checkpoint.save_parts(pipe, run, ("vae",))
    captions = pools["scenes"]()
    run.log(f"{len(captions.canvas)} scenes")
    reader = stage_text.train(pipe, captions, run, Pace(_seconds(args, TEXT_SHARE), args.text_steps), args.text_batch)
    checkpoint.round_off(pipe.text_encoder)
    right = stage_text.accuracy(pipe, reader, pools["held out"](), run)
    run.log(f"captions of held-out scenes read without any mistake: {right:.4f}")
    checkpoint.save_parts(pipe, run)
    return {"held-out captions read": right}


def _judge(pipe: D.QwenImagePipeline, run: Run, number: int) -> Callable[[], str]:
    """Scores of some held-out prompts, by the parts as they are now."""
    parser, sampler = Parser(), Sampler(pipe, run)
    asked = {kind: evaluate.prompts(kind, CANVASES[0], number, 50, stage_text.fits(pipe)) for kind in ("one", "two")}
    channels = pipe.transformer.config.in_channels
    noise = torch.randn(number, 64, channels, generator=torch.Generator().manual_seed(7))

    def judge() -> str:
        found = {}
        for kind, pairs in asked.items():
            pictures = sampler([text for _, text in pairs], 0, noise)
            found[kind] = evaluate.judge(parser, pairs, pictures)
            run.note(f"{kind}, all right", sum(len(c) for c in run.curves.values()), found[kind]["all"])
        return f"{found}"

    return judge


def _train_flow(pipe: D.QwenImagePipeline, data: stage_flow.Data, run: Run, args: argparse.Namespace) -> dict[str, int]:
    start = checkpoint.load_flow(pipe, run, args.work) if args.work is not None else 0
    if start:
        run.log(f"denoiser from {args.work}, {start} steps old")
    seconds = max(_seconds(args, 1.0) - run.elapsed() - FINISH, 1.0)
    pace = Pace(seconds, args.flow_steps)
    plan = stage_flow.Plan(
        args.batch,
        start,
        judge=_judge(pipe, run, min(args.number, 100)),
        interval=seconds / 6,
        save=lambda steps: checkpoint.save_flow(pipe, run, steps),
    )
    stage_flow.train(stage_flow.Learner(pipe, run), data, run, pace, plan)
    return {"flow steps": start + pace.step}


def _scores(run: Run, args: argparse.Namespace, folder: Path, shown: list[Tensor]) -> dict[str, Any]:
    """Scores of the saved pipeline, logged as they come: the time may end before they do."""
    pipe = export.load(folder, run.device)
    batch = 4 if run.device.type == "cpu" else 100
    report, pictures = evaluate.evaluate(pipe, evaluate.Setting(args.number, batch), run.log)
    sheet(torch.cat([*shown, *pictures]), run.out / "sheet.png", 8)
    if not (args.toy or args.smoke) and _seconds(args, 1.0) - run.elapsed() > SWEEP:
        report["two things, all right"] = evaluate.sweep(pipe, 100, batch)
    return report


def _write(report: dict[str, Any], run: Run) -> None:
    (run.out / "metrics.json").write_text(json.dumps(report, indent=1), encoding="utf-8")


def _train_model(
    pipe: D.QwenImagePipeline, pools: dict[str, Callable[[], pool.Pool]], run: Run, args: argparse.Namespace
) -> dict[str, Any]:
    report = _parts(pipe, run, args, pools)
    scenes = pools["scenes"]()
    report["autoencoder PSNR, dB"], pictures = stage_vae.fidelity(pipe.vae, scenes, run)
    sheet(pictures, run.out / "sheet.png", 8)
    latents = stage_vae.to_latents(pipe.vae, scenes, run)
    report |= _train_flow(pipe, stage_flow.to_device(scenes, latents, pipe, run), run, args)

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "demo_model")
        export.save(pipe.to("cpu"), folder)
        export.archive(folder, run.out / "demo_model.tar.xz")
        report["bytes"] = components.size_in_bytes(folder)
        run.log(f"exported {report['bytes']} bytes")
        run.write_curves()
        _write(report, run)
        return {**report, **_scores(run, args, folder, [pictures.cpu()])}


def _train_adapter(pipe: D.QwenImagePipeline, scenes: pool.Pool, run: Run, args: argparse.Namespace) -> dict[str, Any]:
    pace = Pace(max(_seconds(args, 1.0) - run.elapsed() - FINISH / 2, 1.0), args.flow_steps)
    stage_lora.train(pipe, scenes, run, pace, args.batch)
    stage_lora.save(pipe, run.out)
    run.write_curves()
    scores = stage_lora.evaluate_style(args.model, run.out, run.out, args.number, run.device)
    return {"flow steps": pace.step, **scores}


def _smoke_result(run: Run) -> None:
    """Exit code 3 where a long run would be slow: something fell back, or a step takes longer than it should."""
    slow = [f"{name}: {seconds * 1000:.1f} ms a step" for name, seconds in run.step_seconds.items() if seconds > SLOW]
    if run.troubles or slow:
        run.log(f"SMOKE TEST FAILED: {[*run.troubles, *slow]}")
        raise SystemExit(3)
    run.log(f"smoke test passed in {run.elapsed():.0f} s")


def main() -> None:
    args = _arguments()
    began = time.monotonic()
    torch.set_num_threads(min(4, torch.get_num_threads()))  # the workers take the rest
    if args.work is not None and not (args.work / "parts.pt").exists():
        raise FileNotFoundError(f"{args.work} has no parts.pt: it is not the --out of an earlier run")
    args.out.mkdir(parents=True, exist_ok=True)
    sizes = TOY if args.toy else components.Sizes()
    pipe = export.load(args.model) if args.lora else components.pipeline(sizes, args.seed)
    makers = pool.Makers(args.workers, pool.template(pipe.prompt_template_encode))  # forks, hence before CUDA
    pools = {}
    if args.lora is None and (args.vae_share or args.vae_steps):
        pools["vae"] = makers.start(args.vae_scenes, args.seed + (1001 if args.work is not None else 1))
    pools["scenes"] = makers.start(args.scenes, args.seed + (1000 if args.work is not None else 0))
    pools["held out"] = makers.start(60 if args.smoke else 2000, args.seed, held_out=True)
    found = check.differences()
    if found.worst() > 1e-4:
        raise RuntimeError(f"the fast forwards differ from the libraries' with these versions: {found}")

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    quick = device.type == "cuda" and not args.eager
    run = Run(args.out, device, args.seed, quick, quick, args.smoke, began)
    _fast_math()
    run.probe()
    run.log(f"torch {torch.__version__} on {device}; {found}")
    for name in ("vae", "text_encoder", "transformer"):
        component = pipe.components[name].to(device)
        run.log(f"{name}: {sum(p.numel() for p in component.parameters()) / 1e6:.2f} M parameters")

    report: dict[str, Any] = {"arguments": {k: str(v) for k, v in vars(args).items()}}
    report |= _train_adapter(pipe, pools["scenes"](), run, args) if args.lora else _train_model(pipe, pools, run, args)
    makers.close()
    report["seconds"] = round(run.elapsed())
    _write(report, run)
    run.log(json.dumps(report))
    if args.smoke:
        _smoke_result(run)


if __name__ == "__main__":
    main()
