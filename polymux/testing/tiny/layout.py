"""Rewrite a saved checkpoint into the layout of the repositories people download.

transformers 5 saves some things differently from what was published with earlier versions; loaders must take both.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file


def _read(file: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return data


def _write(file: Path, data: object) -> None:
    file.write_text(json.dumps(data, indent=2), encoding="utf-8")


def _rename_tensors(folder: Path, rename: Callable[[str], str]) -> None:
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as handle:
            meta = handle.metadata()
            tensors = {rename(key): handle.get_tensor(key) for key in handle.keys()}  # noqa: SIM118
        save_file(tensors, file, metadata=meta)
    for index in folder.glob("*.index.json"):
        data = _read(index)
        data["weight_map"] = {rename(key): value for key, value in data["weight_map"].items()}
        _write(index, data)


def _slow_tokenizer_files(folder: Path) -> None:
    """vocab.json + merges.txt + added tokens in the config, in place of tokenizer.json."""
    data = _read(folder / "tokenizer.json")
    config = _read(folder / "tokenizer_config.json")
    model = data["model"]
    fields = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
    # CLIP keeps its two markers inside vocab.json, Qwen its special tokens outside it
    inside = config["tokenizer_class"] == "CLIPTokenizer"
    names = {token["content"] for token in data["added_tokens"]}
    vocab = {token: i for token, i in model["vocab"].items() if inside or token not in names}
    (folder / "vocab.json").write_text(json.dumps(vocab, ensure_ascii=False), encoding="utf-8")
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    lines = ["#version: 0.2", *merges]
    (folder / "merges.txt").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    outside = {token["content"]: token["id"] for token in data["added_tokens"] if token["content"] not in vocab}
    if outside:
        _write(folder / "added_tokens.json", outside)
    config["added_tokens_decoder"] = {str(t["id"]): {key: t[key] for key in fields} for t in data["added_tokens"]}
    config["additional_special_tokens"] = config.pop("extra_special_tokens", None) or []
    config.pop("backend", None)
    _write(folder / "tokenizer_config.json", config)
    special = {k: config[k] for k in ("bos_token", "eos_token", "pad_token", "unk_token") if config.get(k)}
    _write(folder / "special_tokens_map.json", special)
    (folder / "tokenizer.json").unlink()


def _clip_name(key: str) -> str:
    return key if key.startswith(("text_model.", "text_projection.")) else "text_model." + key


def _qwen3_name(key: str) -> str:
    return key if key.startswith("model.") else "model." + key


def _publish_folder(folder: Path) -> None:
    config_file = folder / "config.json"
    config = _read(config_file) if config_file.exists() else {}
    architecture = (config.get("architectures") or [""])[0]
    if architecture in ("CLIPTextModel", "CLIPTextModelWithProjection"):
        _rename_tensors(folder, _clip_name)
    if architecture == "Qwen3Model":
        _rename_tensors(folder, _qwen3_name)
        _write(config_file, config | {"architectures": ["Qwen3ForCausalLM"]})
    tokenizer = folder / "tokenizer_config.json"
    if not (tokenizer.exists() and (folder / "tokenizer.json").exists()) or (folder / "processor_config.json").exists():
        return
    if _read(tokenizer).get("tokenizer_class") in ("Qwen2Tokenizer", "CLIPTokenizer"):
        _slow_tokenizer_files(folder)


def published_layout(path: Path) -> None:
    """Rewrite the checkpoint in `path`, in place.

    CLIP text encoders: tensor names get their "text_model." prefix back. Bare Qwen3Model encoders: names get "model."
    and the config says Qwen3ForCausalLM, as in Z-Image and Ovis-Image. Qwen2 and CLIP tokenizers: vocab.json and
    merges.txt instead of tokenizer.json.
    """
    for folder in [path, *sorted(p for p in path.iterdir() if p.is_dir())]:
        _publish_folder(folder)
