"""What the package qwen-tts says on the tiny checkpoints: the command that made `qwen3_tts_reference.npz`, and what
`test_qwen3_tts.py` calls where the package can be imported.

    python -m polymux.testing.tiny make qwen3-tts qwen3-tts-design qwen3-tts-base CHECKPOINTS
    python tests/parity/qwen3_tts_reference.py CHECKPOINTS tests/parity/qwen3_tts_reference.npz

The second one in an environment with qwen-tts 0.1.1 and the transformers that it pins (4.57.3); it imports nothing else
of this repository. Greedy, in fp32 on a CPU.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
LINE, SAID, INSTRUCTIONS = "hello there my friend", "what i said", "a calm voice"
MOST = 40  # first codes, the last of which is not heard


def recording(seconds: float = 0.3, rate: int = 24000) -> Array:
    moments = np.arange(int(seconds * rate)) / rate
    return (0.3 * np.sin(2 * np.pi * 440 * moments) * (1 + np.sin(2 * np.pi * 7 * moments))).astype(np.float32)


# By name: the checkpoint, the package's method, its arguments.
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "voice": ("qwen3-tts", "generate_custom_voice", {"speaker": "anna", "language": "english"}),
    "auto": ("qwen3-tts", "generate_custom_voice", {"speaker": "bert", "language": "auto"}),
    "dialect": ("qwen3-tts", "generate_custom_voice", {"speaker": "chen", "language": "chinese"}),
    "instructed": ("qwen3-tts", "generate_custom_voice", {"speaker": "anna", "instruct": INSTRUCTIONS}),
    "design": ("qwen3-tts-design", "generate_voice_design", {"instruct": INSTRUCTIONS, "language": "english"}),
    "plain": ("qwen3-tts-design", "generate_voice_design", {"instruct": ""}),
    "clone": ("qwen3-tts-base", "generate_voice_clone", {"ref_text": SAID, "language": "english"}),
    "long-clone": ("qwen3-tts-base", "generate_voice_clone", {"ref_text": SAID * 4}),
    "vector": ("qwen3-tts-base", "generate_voice_clone", {"x_vector_only_mode": True}),
}


def speak(folder: Path, names: list[str]) -> dict[str, Array]:
    """Codes (frames, groups) and samples of these cases, and the vector of the recorded voice."""
    from qwen_tts import Qwen3TTSModel

    made: dict[str, Array] = {}
    loaded: dict[str, Any] = {}
    for name in names:
        checkpoint, method, arguments = CASES[name]
        if checkpoint not in loaded:
            loaded[checkpoint] = Qwen3TTSModel.from_pretrained(str(folder / checkpoint))
        tts, written = loaded[checkpoint], []
        if checkpoint.endswith("base"):
            arguments = arguments | {"ref_audio": (recording(), 24000)}
            vector = tts.model.extract_speaker_embedding(recording(), 24000)
            made["vector/values"] = vector.float().numpy()
        codec = tts.model.speech_tokenizer
        decode = codec.decode
        codec.decode = lambda parts, decode=decode, written=written: written.extend(parts) or decode(parts)
        how = {"do_sample": False, "subtalker_dosample": False, "max_new_tokens": MOST}
        (wav,), _ = getattr(tts, method)(text=LINE, **arguments, **how)
        codec.decode = decode
        made[f"{name}/codes"] = written[0]["audio_codes"].numpy().astype(np.int16)
        made[f"{name}/wav"] = np.asarray(wav, np.float32)
    return made


if __name__ == "__main__":
    chosen = sys.argv[3:] or list(CASES)
    np.savez_compressed(sys.argv[2], **speak(Path(sys.argv[1]), chosen))
