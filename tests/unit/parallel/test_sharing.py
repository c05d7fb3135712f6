"""Results that ranks tell each other: nothing of a device is pickled, whatever holds it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKLOutput
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

from polymux.parallel.sharing import _Whole, _without_tensors


class Named(NamedTuple):
    result: object
    problem: str = ""


def test_tensors_go_by_themselves_wherever_they_are() -> None:
    distribution = DiagonalGaussianDistribution(torch.arange(8.0).reshape(1, 8, 1, 1))
    own = [Named((AutoencoderKLOutput(distribution), {"x": torch.ones(2, dtype=torch.bfloat16)}), "none")]
    tensors: list[torch.Tensor] = []
    note = _without_tensors(own, tensors)
    assert note is not None and len(note.forms) == len(tensors) > 2
    assert b"torch.storage" not in note.pickled and b"_rebuild_tensor" not in note.pickled
    places = [torch.empty(form.shape, dtype=form.dtype).copy_(t) for form, t in zip(note.forms, tensors, strict=True)]
    (got,) = _Whole(note.pickled, places, torch.device("cpu")).load()
    assert type(got) is Named and got.problem == "none"
    output, others = got.result
    assert torch.equal(output.latent_dist.mean, distribution.mean)
    assert others["x"].dtype == torch.bfloat16 and torch.equal(others["x"], torch.ones(2))


def test_a_device_is_the_receivers() -> None:
    tensors: list[torch.Tensor] = []
    note = _without_tensors([torch.device("cuda:0"), torch.device("cpu")], tensors)
    assert note is not None
    assert _Whole(note.pickled, [], torch.device("cuda:1")).load() == [torch.device("cuda:1"), torch.device("cpu")]


def test_what_cannot_be_pickled() -> None:
    assert _without_tensors([lambda: None], []) is None
