"""Who works with whom on an engine's calls: what the configuration wants, the family allows, and the mesh has."""

from __future__ import annotations

from polymux.config import EngineConfig
from polymux.diffusion.call import Call
from polymux.diffusion.guidance_split import Circles, GuidanceSplit
from polymux.diffusion.runner import Runner
from polymux.errors import ConfigError, PolymuxError
from polymux.families.base import Family
from polymux.parallel.mesh import Mesh
from polymux.parallel.sharing import Sharing


def divide_guidance(runner: Runner, family: Family, config: EngineConfig, mesh: Mesh) -> GuidanceSplit | None:
    """None on a mesh of one rank. Raises ConfigError if the model's calls cannot be divided at all."""
    if mesh.size == 1:
        return None
    size, parallel = mesh.degree("cfg"), config.parallel
    cuttable = "denoiser" in family.merge
    if size > 1 and not (cuttable or (family.collect_guidance and family.pipelines)):
        why = family.unmerged_because or "nothing proves that they are independent"
        what = f"--cfg-parallel-size {size}: the guidance calls of this model cannot be divided: {why}"
        raise ConfigError(what, param="cfg_parallel_size")
    everyone, inner = Sharing(mesh.world, runner.device), Sharing(mesh.inner, runner.device)

    def tied(call: Call, dividing: bool) -> Sharing | None:
        if call.component.role == "denoiser":
            if parallel.use_hsdp or config.gathers_blocks:
                return everyone
            return None if inner.size == 1 else (inner if dividing else everyone)
        ranks = parallel.vae_patch_parallel_size if call.component.role == "decoder" else parallel.text_encoder_tp_size
        return everyone if ranks > 1 else None

    def may_split(call: Call) -> bool:
        component = call.component
        main = component.role == "denoiser" and call.method in component.main
        return cuttable and main and runner.may_merge(component.name)

    circles = Circles(Sharing(mesh.group("cfg"), runner.device), everyone, tied)
    return GuidanceSplit(runner, circles, may_split, _raise)


def _raise(error: PolymuxError) -> None:
    raise error
