"""What a model has read of a prompt's media, in the form in which its tokens are computed: on the host.

Knows adapters and sequences; not when prompts are read.
"""

from __future__ import annotations

import numpy as np
import torch

from polymux.ar.features import Features, Ints, Rows
from polymux.engine.generate_model import GenerateModel
from polymux.families.chat import ChatCall, ChatFamily, Read


def read(model: GenerateModel, call: ChatCall) -> tuple[ChatCall, Features | None]:
    """What the media of a prompt are to the model, if there are any; and the call without what was needed for that."""
    if not call.contents:
        return call, None
    assert isinstance(model.family, ChatFamily)
    call, made = model.family.adapter.read(model.own(), call)
    return call, None if made is None else features_of(made)


def features_of(read: Read) -> Features:
    """Waits for the device."""
    positions = _ints(read.positions)
    deeper = Rows(_ints(read.deep_places), torch.stack(list(read.deeper)).cpu()) if len(read.deeper) else None
    return Features(
        inputs=Rows(_ints(read.places), read.inputs[read.places][None].cpu()),
        deeper=deeper,
        positions=positions,
        shift=int(positions.max()) + 1 - positions.shape[1],
    )


def _ints(tensor: torch.Tensor) -> Ints:
    return np.asarray(tensor.cpu().numpy(), dtype=np.int64)
