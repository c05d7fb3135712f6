"""Which stages a model has: known before any process is started, from what its checkpoint says it is.

Opens a connection only if the model is on the hub and stages are asked for. Imports no torch.
"""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

from polymux.config import EngineConfig, ModelConfig, hub_offline
from polymux.errors import CheckpointError, ConfigError
from polymux.families import generate_family_of
from polymux.families.divisible import check_ranks
from polymux.families.graph import Graph, StageDeclaration
from polymux.families.settings import check_pipeline, check_settings
from polymux.loading.index import CLASSIC_INDEX, MODULAR_INDEX

DEMO = "demo"  # the embedded model
WHOLE = Graph(stages=(StageDeclaration(name="model", does="write"),), edges=())  # all of it in one process


def graph_of(config: EngineConfig) -> Graph:
    """The stages that are to run. Raises ConfigError if the model has no others, CheckpointError if there is none."""
    if not config.stages.split_stages:
        return WHOLE
    name = _class_of(config.model)
    family = generate_family_of(name)
    if family is None or family.graph is None:
        what = f"{name or 'this model'} has one stage only: there is nothing to split"
        raise ConfigError(f"split_stages: {what}", param="split_stages")
    return family.graph


def check_divided(config: EngineConfig) -> None:
    """Raises ConfigError for ranks that a model cannot have, as far as its folder tells what it is."""
    if config.parallel.changed and Path(config.model.model).expanduser().is_dir():
        name = _class_of(config.model)
        if generate_family_of(name) is not None:
            check_ranks(config, name)


def check_model(config: ModelConfig) -> None:
    """Raises CheckpointError if there is no such folder, and nothing on the hub could have this name. Whether a folder
    holds a model is for whoever loads it to say."""
    if config.model == DEMO or Path(config.model).expanduser().is_dir():
        return
    from huggingface_hub.errors import HFValidationError  # here: most models need it in no API process
    from huggingface_hub.utils import validate_repo_id

    try:
        if config.model.startswith((".", "/", "~")):
            raise HFValidationError
        validate_repo_id(config.model)
    except HFValidationError:
        what = f"{config.model}: no such folder, and not a hub id (OWNER/NAME)"
        raise CheckpointError(what) from None


def check_acts(config: EngineConfig) -> None:
    """Raises ConfigError for a setting that cannot act on the model, where it is known without a connection what that
    is. Whoever loads it looks again."""
    demo = config.model.model == DEMO
    folder = Path(str(resources.files("polymux") / "demo_model") if demo else config.model.model).expanduser()
    if (folder / CLASSIC_INDEX).is_file():
        check_pipeline(config, config.model.model_class_name or str(_read(folder / CLASSIC_INDEX).get("_class_name")))
    elif (folder / MODULAR_INDEX).is_file():
        check_settings(config, None)
    elif folder.is_dir() and (family := generate_family_of(_class_of(config.model))) is not None:
        check_settings(config, family)


def _class_of(config: ModelConfig) -> str:
    """The class of transformers that a checkpoint is of; "": of none."""
    if config.model == DEMO:
        return ""
    folder = Path(config.model).expanduser()
    named = _read(folder / "config.json" if folder.is_dir() else _fetched(config)).get("architectures")
    return named[0] if isinstance(named, list) and named and isinstance(named[0], str) else ""


def _read(file: Path) -> dict[str, Any]:
    """An object of JSON; empty, if the file holds none."""
    try:
        made = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return made if isinstance(made, dict) else {}


def _fetched(config: ModelConfig) -> Path:
    from huggingface_hub import hf_hub_download  # here: most models need it in no API process
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        file = hf_hub_download(
            config.model,
            "config.json",
            revision=config.revision,
            cache_dir=config.cache_dir,
            local_files_only=hub_offline(),
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        first = (str(error).splitlines() or [""])[0]
        raise CheckpointError(f"{config.model}: its config.json is not to be had: {first}") from None
    return Path(file)
