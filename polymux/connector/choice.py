"""Which connector an edge has."""

from __future__ import annotations

import os

from polymux.connector.base import Connector
from polymux.connector.memory import MemoryConnector
from polymux.connector.tcp import TcpConnector
from polymux.errors import ConfigError
from polymux.stage_config import StageConfig


def make_connector(config: StageConfig) -> Connector[int] | Connector[bytes]:
    """As the configuration says; auto: shared memory where there is some. Raises ConfigError."""
    memory = hasattr(os, "memfd_create")
    if config.stage_connector == "shared-memory" and not memory:
        what = "memory without a name (memfd) exists on Linux only; tcp works everywhere"
        raise ConfigError(f"stage_connector='shared-memory': {what}", param="stage_connector")
    if config.stage_connector == "tcp" or not memory:
        return TcpConnector(config.connector_host)
    return MemoryConnector()
