"""Tensors from one stage process to another: a small interface, shared memory on one host, TCP between two.

Knows bytes and arrays; not what they mean, and not who is told of a parcel. Imports no torch.
"""

from polymux.connector.base import Connector, Tensors
from polymux.connector.choice import make_connector

__all__ = ["Connector", "Tensors", "make_connector"]
