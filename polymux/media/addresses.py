"""Which addresses may be fetched from. Knows addresses, not names: how a name becomes addresses is decided elsewhere.

Everything that is not plainly part of the public internet is refused: private, shared, loopback, link-local (where
clouds keep their metadata), multicast, reserved and documentation networks, and what leads there by being embedded in
an IPv6 address. An operator may open single networks.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

# The registries of special addresses (RFC 6890 and later), written out: what `ipaddress` takes for global differs
# between releases of Python, and it takes multicast for global.
_CLOSED = tuple(
    ipaddress.ip_network(network)
    for network in (
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",  # shared by the customers of a provider
        "127.0.0.0/8",
        "168.63.129.16/32",  # public by its number, and the platform of a cloud by its use
        "169.254.0.0/16",
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.31.196.0/24",
        "192.52.193.0/24",
        "192.88.99.0/24",
        "192.168.0.0/16",
        "192.175.48.0/24",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/3",  # multicast, and reserved
        "2001::/23",  # Teredo, ORCHID and others
        "2001:db8::/32",
        "2002::/16",  # 6to4: an IPv4 address inside, of a network that hardly exists any more
        "2620:4f:8000::/48",
        "3fff::/20",
    )
)
_UNICAST = ipaddress.IPv6Network("2000::/3")  # all of IPv6 that is given out
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")  # how hosts without IPv4 reach the rest: the last 32 bits are IPv4


class AddressRule:
    """Public addresses, and those of the `opened` networks."""

    def __init__(self, opened: Iterable[str] = ()) -> None:
        self._opened: tuple[Network, ...] = tuple(ipaddress.ip_network(network) for network in opened)

    def allows(self, text: str) -> bool:
        """Whether one may connect to this address, as a resolver writes it. False for what is no address at all."""
        try:
            address = _innermost(ipaddress.ip_address(text.partition("%")[0]))
        except ValueError:
            return False
        return any(address in network for network in self._opened) or _is_public(address)


def _innermost(address: Address) -> Address:
    """The IPv4 address that packets would really go to, if there is one inside."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
        if address in _NAT64:
            return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address


def _is_public(address: Address) -> bool:
    if address.version == 6 and address not in _UNICAST:
        return False
    return address.is_global and not any(address in network for network in _CLOSED)
