"""Make the embedded model, the one that `--model demo` serves: `python -m polymux.testing.make_demo [DIR]`.

A Qwen-Image pipeline of a quarter of a million random weights, in fp32, below 1 MB. It paints coloured noise, the same
for the same seed and prompt, in a fraction of a second on a laptop: enough to see that an installation works. The
result is committed in `polymux/demo_model`; making it again gives the same bytes.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import diffusers as D

from polymux.testing.tiny import Ctx
from polymux.testing.tiny.encoders import qwen25_vl
from polymux.testing.tiny.schedulers import qwen_image_scheduler
from polymux.testing.tiny.tokenizers import qwen_tokenizer
from polymux.testing.tiny.vaes import vae_qwen
from polymux.testing.tiny.weights import parts

DEMO_MODEL = Path(__file__).resolve().parents[1] / "demo_model"
README = """\
The embedded model (`--model demo`): a tiny Qwen-Image pipeline with random weights, in diffusers' layout.
Made by `python -m polymux.testing.make_demo`; do not edit.
"""


def _pipeline() -> D.QwenImagePipeline:
    tok = qwen_tokenizer()
    components = parts(
        Ctx(seed=1),
        scheduler=qwen_image_scheduler(),
        vae=vae_qwen(dim_mult=[1, 2, 2, 2]),
        text_encoder=qwen25_vl(tok, layers=1, vision=16),
        tokenizer=tok,
        transformer=D.QwenImageTransformer2DModel(
            patch_size=2,
            in_channels=64,
            out_channels=16,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            axes_dims_rope=(4, 6, 6),
        ),
    )
    return D.QwenImagePipeline(**components)


def make_demo(target: Path) -> Path:
    """Write the checkpoint into the folder `target`, replaced if present."""
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch, "demo")
        _pipeline().save_pretrained(made)
        (made / "README.md").write_text(README, encoding="utf-8")
        if target.exists():
            shutil.rmtree(target)
        shutil.copytree(made, target)
    return target


def main(argv: list[str]) -> int:
    if len(argv) > 1 or argv[:1] in (["-h"], ["--help"]):
        print("usage: python -m polymux.testing.make_demo [DIR]", file=sys.stderr)
        return 2
    print(make_demo(Path(argv[0]) if argv else DEMO_MODEL))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
