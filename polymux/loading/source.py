"""From a model's name to a folder: a local one, the embedded demo model, or a snapshot of a hub repository.

Of a repository only the files that the pipeline needs are downloaded. When the user asks for offline use, nothing here
opens a connection. Whether the folder holds a complete model is checked when it is loaded.
"""

from __future__ import annotations

import glob
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path, PurePosixPath

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id

from polymux.config import ModelConfig, hub_offline
from polymux.errors import CheckpointError, ConfigError
from polymux.loading.index import CLASSIC_INDEX, MODULAR_INDEX, PipelineIndex, parse_index
from polymux.loading.layout import CONFIG, declared_model
from polymux.loading.libraries import one_line, reading
from polymux.loading.options import LoadFlags, LoadOptions, parse_options
from polymux.loading.weights import DIFFUSERS_NAMES, TRANSFORMERS_NAMES, choose, is_shard_of

DEMO = "demo"

# Files of these kinds are weights in some format; all others in a component's folder are small and needed.
WEIGHT_SUFFIXES = frozenset({
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".msgpack", ".h5", ".onnx", ".onnx_data", ".pb", ".gguf", ".ot",
    ".npz", ".tflite", ".flashpack", ".xml",
})  # fmt: skip


def resolve(config: ModelConfig) -> Path:
    """The folder of a model. Raises CheckpointError if there is none, ConfigError if the settings contradict it."""
    name = config.model
    if not name.strip():
        raise ConfigError(f"model={name!r}: give a folder, a hub id, or {DEMO!r}", param="model")
    if name == DEMO:
        _refuse_revision(config)
        return Path(str(resources.files("polymux") / "demo_model"))
    with reading(f"model {name[:200]!r}"):
        path = Path(name).expanduser()
        if path.is_dir():
            _refuse_revision(config)
            return path.resolve()
        if path.exists():
            raise CheckpointError(f"{path}: a file; give the folder of a diffusers checkpoint, or a hub id")
    if not _is_hub_id(name):
        raise CheckpointError(f"{name}: no such folder, and not a hub id (OWNER/NAME)")
    return _fetch_pipeline(config, parse_options(config.diffusers_load_kwargs))


def _refuse_revision(config: ModelConfig) -> None:
    if config.revision is not None:
        raise ConfigError(
            f"revision={config.revision!r}: only hub models have revisions, {config.model!r} is local", param="revision"
        )


def _is_hub_id(name: str) -> bool:
    if name.startswith((".", "/", "~")) or "\\" in name:
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def fetch_component(config: ModelConfig, options: LoadOptions, repo: str, revision: str | None, subfolder: str) -> Path:
    """The snapshot of a repository in which one component of a modular pipeline lies."""
    if not _is_hub_id(repo):
        raise CheckpointError(f"{repo}: no such folder, and not a hub id")
    hub = _Hub(repo, revision, config.cache_dir, options.flags)
    if hub_offline():
        return hub.cached()
    names = hub.names()
    return hub.download(component_files(names, subfolder, options.flags, weights=config.load_format != "dummy"))


def single_file(name: str, cache_dir: str | None, param: str) -> Path:
    """The .safetensors file that is meant: itself, the only one of a folder, or the only one of a hub repository.

    Raises CheckpointError; `param` is the setting that named it.
    """
    with reading(f"{param}={name[:200]!r}"):
        path = Path(name).expanduser()
        if path.is_file():
            return _only([str(path)], f"{param}={name!r}")
        if path.is_dir():
            return _only([str(file) for file in path.iterdir()], f"{param}={name!r}")
    if not _is_hub_id(name):
        raise CheckpointError(f"{param}={name!r}: no such file or folder, and not a hub id (OWNER/NAME)")
    hub = _Hub(name, None, cache_dir, LoadFlags())
    if hub_offline():
        return _only([str(file) for file in hub.cached().iterdir()], str(hub))
    wanted = _only([each for each in hub.names() if "/" not in each], str(hub))
    return hub.download([wanted.name]) / wanted.name


def _only(names: Collection[str], where: str) -> Path:
    found = sorted(name for name in names if name.endswith(".safetensors"))
    if len(found) != 1:
        what = f"{len(found)} .safetensors files ({', '.join(Path(n).name for n in found[:6])})" if found else "none"
        raise CheckpointError(f"{where}: one .safetensors file is needed, and there is {what}")
    return Path(found[0])


def _fetch_pipeline(config: ModelConfig, options: LoadOptions) -> Path:
    hub = _Hub(config.model, config.revision, config.cache_dir, options.flags)
    if hub_offline():
        return hub.cached()
    names = hub.names()
    indices = [name for name in (CLASSIC_INDEX, MODULAR_INDEX) if name in names]
    if not indices and CONFIG in names:
        declared_model(hub.download([CONFIG]), str(hub))  # before the rest of something that is not served
        return hub.download(model_files(names, options.flags))
    if not indices:
        raise CheckpointError(
            f"{hub}: no checkpoint: the repository holds neither {CLASSIC_INDEX} nor {MODULAR_INDEX} nor {CONFIG}"
        )
    folder = hub.download(indices)
    wanted: set[str] = set(indices)
    for name in indices:
        index = parse_index(folder / name)
        wanted |= set(pipeline_files(names, index, options, weights=config.load_format != "dummy"))
    return hub.download(sorted(wanted))


def fetch_model(name: str, cache_dir: str | None) -> Path:
    """The folder of a model of transformers that stands beside another one: a local one, or a hub repository."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path.resolve()
    if not _is_hub_id(name):
        raise CheckpointError(f"{name}: no such folder, and not a hub id (OWNER/NAME)")
    hub = _Hub(name, None, cache_dir, LoadFlags())
    return hub.cached() if hub_offline() else hub.download(model_files(hub.names(), LoadFlags()))


def model_files(names: Collection[str], flags: LoadFlags) -> list[str]:
    """Which of a repository's files a model of transformers needs: those at its top, and folders of what is beside it.
    Of several sets of weights, one."""
    folders = {name.partition("/")[0] for name in names if name.endswith(f"/{CONFIG}") and name.count("/") == 1}
    wanted = component_files(names, "", flags, weights=True)
    for folder in sorted(folders):
        wanted += component_files(names, folder, flags, weights=True)
    return sorted({*wanted, *(name for name in names if name.endswith(".npy"))})


def pipeline_files(names: Collection[str], index: PipelineIndex, options: LoadOptions, *, weights: bool) -> list[str]:
    """Which of a repository's files the pipeline needs. Components that were given ready-made need none."""
    wanted = [n for n in names if "/" not in n and n.endswith(".json")]
    if options.flags.trust_remote_code:
        wanted += [n for n in names if "/" not in n and n.endswith(".py")]
    for entry in index.components.values():
        if entry.name in options.given or (entry.class_name is None and not index.modular):
            continue
        found = component_files(names, entry.subfolder, options.flags, weights=weights)
        if not found and not index.modular:  # old pipelines of one model keep its files at the root
            found = component_files(names, "", options.flags, weights=weights)
        wanted += found
    return sorted(set(wanted))


def component_files(names: Collection[str], subfolder: str, flags: LoadFlags, *, weights: bool) -> list[str]:
    """Which of a repository's files one component needs: all that is not weights, and one set of weights if wanted."""
    prefix = f"{subfolder}/" if subfolder else ""
    inside = {name.removeprefix(prefix) for name in names if name.startswith(prefix)}
    if not prefix:
        inside = {name for name in inside if "/" not in name}
    wanted = {name for name in inside if PurePosixPath(name).suffix not in WEIGHT_SUFFIXES}
    if not flags.trust_remote_code:
        wanted = {name for name in wanted if not name.endswith(".py")}
    if weights:
        wanted |= _weight_files(inside, flags, subfolder or "the repository")
    return sorted(prefix + name for name in wanted)


def _weight_files(inside: Collection[str], flags: LoadFlags, where: str) -> set[str]:
    """The weights among a component's files: the single file or the index with its shards; none for a tokenizer."""
    mains = [chosen[0] for naming in (DIFFUSERS_NAMES, TRANSFORMERS_NAMES) if (chosen := choose(inside, naming, flags))]
    others = sorted(name for name in inside if name.endswith((".safetensors", ".bin")))
    if others and not mains:
        raise CheckpointError(
            f"{where}: none of its weights are the ones asked for; it has {', '.join(others[:6])}; "
            "diffusers_load_kwargs={'variant': ..., 'use_safetensors': ...} chooses"
        )
    return {name for name in inside if name in mains or any(is_shard_of(main, name) for main in mains)}


class _Hub:
    """One repository at one revision, with the hub's errors turned into polymux's."""

    def __init__(self, repo: str, revision: str | None, cache_dir: str | None, flags: LoadFlags) -> None:
        self._repo, self._revision, self._cache_dir, self._flags = repo, revision, cache_dir, flags

    def __str__(self) -> str:
        return self._repo if self._revision is None else f"{self._repo}@{self._revision}"

    def names(self) -> list[str]:
        with self._errors():
            info = HfApi(token=self._flags.token).model_info(self._repo, revision=self._revision)
        return [file.rfilename for file in info.siblings or ()]

    def download(self, names: Collection[str]) -> Path:
        with self._errors():
            folder = snapshot_download(
                self._repo,
                revision=self._revision,
                cache_dir=self._cache_dir,
                token=self._flags.token,
                force_download=self._flags.force_download,
                allow_patterns=[glob.escape(name) for name in names],
            )
        return Path(folder)

    def cached(self) -> Path:
        """The snapshot as far as it was downloaded before; no network."""
        with self._errors():
            folder = snapshot_download(
                self._repo,
                revision=self._revision,
                cache_dir=self._cache_dir,
                local_files_only=True,
                allow_patterns=[],
            )
        return Path(folder)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except GatedRepoError:
            raise CheckpointError(
                f"{self}: the hub grants access only after you asked for it, and with a token"
            ) from None
        except RepositoryNotFoundError:
            raise CheckpointError(f"{self}: no such folder, and no such repository on the hub") from None
        except RevisionNotFoundError:
            raise CheckpointError(f"{self}: the repository has no revision {self._revision!r}") from None
        except LocalEntryNotFoundError as error:
            if hub_offline():
                raise CheckpointError(
                    f"{self}: no such folder, not in the hub's cache, and HF_HUB_OFFLINE forbids to download it"
                ) from None
            raise self._unreachable(error) from error
        except (HTTPError, OSError) as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: BaseException) -> CheckpointError:
        return CheckpointError(
            f"{self}: the hub cannot be reached: {one_line(error)} (HF_HUB_OFFLINE=1 uses what is in the cache)"
        )
