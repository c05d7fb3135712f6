"""Sounds that a request brings, as models take them: one channel, at their own rate."""

from __future__ import annotations

import numpy as np

from polymux.errors import InvalidRequestError
from polymux.families.generate import Reference
from polymux.media.audio import Sound, resample
from polymux.media.wire import Array
from polymux.request import ArrayData, Request, SamplingParams
from polymux.sampling import REFERENCE

_FULL = 32768.0  # of 16 bits


def reference_of(request: Request, params: SamplingParams, sample_rate: int) -> Reference | None:
    """None if the request has none. Raises InvalidRequestError for samples that mean nothing."""
    given = request.media.get(REFERENCE)
    if given is None:
        return None
    (data,) = given
    assert isinstance(data, ArrayData)  # was checked
    return Reference(samples=mono_of(data, sample_rate, REFERENCE), text=(params.ref_text or "").strip())


def mono_of(data: ArrayData, sample_rate: int, param: str) -> Array:
    """Float32 samples (samples,). Raises InvalidRequestError, with `param`, for samples that mean nothing."""
    assert data.sample_rate is not None  # was checked
    samples = np.frombuffer(data.data, data.dtype).reshape(data.shape)
    if not np.isfinite(samples).all():
        raise InvalidRequestError(f"{param}: its samples are not all finite", param=param)
    floats = samples.astype(np.float32) / (_FULL if samples.dtype == np.int16 else 1)
    mono = floats.mean(axis=0, keepdims=True, dtype=np.float32)
    if data.sample_rate != sample_rate:
        mono = resample(Sound(mono, data.sample_rate), sample_rate)
    if not mono.shape[1]:
        raise InvalidRequestError(f"{param}: it is too short to be heard", param=param)
    made: Array = np.ascontiguousarray(mono[0])
    return made
