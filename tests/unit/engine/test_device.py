"""Names of devices."""

from __future__ import annotations

import pytest
import torch

from polymux.engine.device import resolve_device
from polymux.errors import ConfigError


def test_the_cpu() -> None:
    assert resolve_device("cpu") == torch.device("cpu")


def test_auto_is_what_there_is() -> None:
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(
    "name", ["", "gpu", "CPU", "cpu:0", "cuda:", "cuda:x", "cuda:-1", "cuda:0:1", "mps", "meta", "xpu", "cuda:1 "]
)
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="allowed are auto, auto:N, cpu, cuda and cuda:N") as error:
        resolve_device(name)
    assert error.value.param == "device"


@pytest.mark.parametrize("index", [torch.cuda.device_count(), 200, 256, 99999])
def test_a_device_that_is_not_there(index: int) -> None:
    with pytest.raises(ConfigError, match=f"there are {torch.cuda.device_count()} CUDA devices"):
        resolve_device(f"cuda:{index}")
