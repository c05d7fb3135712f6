"""Whether, and how, an engine divides guidance among ranks: what the configuration wants, the family allows, and the
mesh has."""

from __future__ import annotations

from polymux.diffusion.call import Call
from polymux.diffusion.guidance_split import GuidanceSplit
from polymux.diffusion.runner import Runner
from polymux.errors import ConfigError
from polymux.families.base import Family
from polymux.parallel.mesh import Mesh
from polymux.parallel.sharing import Sharing


def divide_guidance(runner: Runner, family: Family, mesh: Mesh) -> GuidanceSplit | None:
    """None on a mesh of one rank. Raises ConfigError if the model's calls cannot be divided at all."""
    if mesh.size == 1:
        return None
    size = mesh.degree("cfg")
    cuttable = "denoiser" in family.merge
    if size > 1 and not (cuttable or (family.collect_guidance and family.pipelines)):
        why = family.unmerged_because or "nothing proves that they are independent"
        what = f"--cfg-parallel-size {size}: the guidance calls of this model cannot be divided: {why}"
        raise ConfigError(what, param="cfg_parallel_size")

    def may_split(call: Call) -> bool:
        component = call.component
        return (
            cuttable
            and component.role == "denoiser"
            and call.method in component.main
            and runner.may_merge(component.name)
        )

    everyone = Sharing(mesh.world, runner.device)
    return GuidanceSplit(runner, Sharing(mesh.group("cfg"), runner.device), everyone, may_split)
