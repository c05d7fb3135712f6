"""Which addresses may be fetched from, in every spelling that a resolver can give."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polymux.media.addresses import AddressRule

CLOSED = [
    "0.0.0.0", "10.1.2.3", "100.64.0.1", "100.100.100.200", "127.0.0.1", "127.255.255.254", "168.63.129.16",
    "169.254.169.254", "172.16.0.1", "172.31.255.255", "192.0.0.192", "192.168.1.1", "198.18.0.1", "203.0.113.7",
    "224.0.0.1", "239.255.255.255", "240.0.0.1", "255.255.255.255",
    "::", "::1", "::127.0.0.1", "::8.8.8.8", "fc00::1", "fd00:ec2::254", "fe80::1", "fe80::1%eth0", "fec0::1",
    "ff02::1", "fec0::2",
    "100::1", "2001::1", "2001:db8::1", "2002:7f00:1::", "2002:808:808::", "3fff::1", "64:ff9b:1::1", "5f00::1",
    "::ffff:0:127.0.0.1",
]  # fmt: skip
OPEN = ["8.8.8.8", "1.1.1.1", "100.63.255.255", "172.15.0.1", "172.32.0.1", "2606:4700::1111", "2a00:1450::1"]

PUBLIC = AddressRule()
ipv4 = st.ip_addresses(v=4)
inner = st.one_of(ipv4, st.sampled_from([ipaddress.ip_address(a) for a in [*CLOSED, *OPEN] if ":" not in a]))


@pytest.mark.parametrize("address", CLOSED)
def test_closed(address: str) -> None:
    assert not PUBLIC.allows(address)


@pytest.mark.parametrize("address", OPEN)
def test_open(address: str) -> None:
    assert PUBLIC.allows(address)


@pytest.mark.parametrize("text", ["", "localhost", "127.1", "1.2.3", "0x7f.0.0.1", "::g", "8.8.8.8.8", "8.8.8.8/8"])
def test_what_is_no_address_is_closed(text: str) -> None:
    assert not PUBLIC.allows(text)


@given(inner)
def test_an_address_inside_another_is_judged_like_itself(address: ipaddress.IPv4Address) -> None:
    number = int(address)
    mapped = ipaddress.IPv6Address((0xFFFF << 32) | number)
    translated = ipaddress.IPv6Address((0x64FF9B << 96) | number)
    for outer in (mapped, translated):
        for spelling in (str(outer), outer.exploded, str(outer).upper(), f"::ffff:{address}"):
            assert PUBLIC.allows(spelling) == PUBLIC.allows(str(address)), spelling


@given(inner)
def test_nothing_leads_through_old_tunnels(address: ipaddress.IPv4Address) -> None:
    number = int(address)
    six_to_four = ipaddress.IPv6Address((0x2002 << 112) | (number << 80))
    teredo = ipaddress.IPv6Address((0x20010000 << 96) | (number ^ 0xFFFFFFFF))
    compatible = ipaddress.IPv6Address(number)
    assert not any(PUBLIC.allows(str(a)) for a in (six_to_four, teredo, compatible))


@given(st.one_of(ipv4, st.ip_addresses(v=6, network="2000::/3")))
def test_nothing_is_open_that_python_calls_special(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> None:
    if address.is_private or address.is_multicast or address.is_reserved or address.is_link_local:
        assert not PUBLIC.allows(str(address))


@given(st.ip_addresses(v=6))
def test_of_what_is_not_given_out_only_the_two_wrappers_are_open(address: ipaddress.IPv6Address) -> None:
    if PUBLIC.allows(str(address)):
        assert any(address in ipaddress.ip_network(n) for n in ("2000::/3", "::ffff:0:0/96", "64:ff9b::/96"))


def test_an_operator_opens_a_network_and_nothing_else() -> None:
    rule = AddressRule(["10.1.0.0/16", "fd00::/8"])
    assert all(rule.allows(a) for a in ("10.1.2.3", "::ffff:10.1.2.3", "64:ff9b::10.1.2.3", "fd12::1", "8.8.8.8"))
    assert not any(rule.allows(a) for a in ("10.2.0.1", "127.0.0.1", "fc00::1", "::1"))
