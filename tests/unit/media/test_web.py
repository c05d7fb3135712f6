"""Fetching over HTTP: what comes, what is too much, and where nobody gets."""

from __future__ import annotations

import asyncio
import gzip
import socket
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler

import pytest
from file_server import CERTIFICATE, FileServer, Names, running, web
from hypothesis import given, settings
from hypothesis import strategies as st

import polymux.media.web
from polymux.errors import ConfigError, InvalidRequestError
from polymux.media.connect import RESOLVING_THREADS, Resolver
from polymux.media.web import WebSource

DATA = bytes(range(256)) * 40


@pytest.fixture(scope="module")
def server() -> Iterator[FileServer]:
    with running(FileServer()) as started:
        yield started


def fetch(url: str, source: WebSource | None = None, max_bytes: int = 100_000) -> bytes:
    async def go() -> bytes:
        chosen = web() if source is None else source
        try:
            return await chosen.fetch(url, param="image", max_bytes=max_bytes)
        finally:
            await chosen.aclose()

    return asyncio.run(go())


def refused(url: str, source: WebSource | None = None, max_bytes: int = 100_000) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        fetch(url, source, max_bytes)
    assert caught.value.param == "image"
    assert caught.value.message.startswith("image: ")
    return caught.value.message


def test_a_file(server: FileServer) -> None:
    assert fetch(server.file("/a", DATA) + "#part") == DATA
    path, headers = server.seen[-1]
    assert path == "/a"
    assert set(headers) == {"host", "user-agent", "accept", "accept-encoding"}
    assert headers["host"] == f"127.0.0.1:{server.port}"


def test_a_body_without_a_length(server: FileServer) -> None:
    assert fetch(server.file("/b", DATA, Content_Length="")) == DATA


@pytest.mark.parametrize("status", [201, 204, 206, 304, 400, 401, 404, 500])
def test_only_200_is_a_file(server: FileServer, status: int) -> None:
    assert f"answered {status}" in refused(server.file("/c", b"", status))


def test_the_limit_is_exact_and_the_length_is_believed_only_if_it_refuses(server: FileServer) -> None:
    url = server.file("/d", DATA)
    assert fetch(url, max_bytes=len(DATA)) == DATA
    assert "more than 10239 bytes" in refused(url, max_bytes=len(DATA) - 1)
    chunked = server.file("/e", DATA, Content_Length="")
    assert "more than 10239 bytes" in refused(chunked, max_bytes=len(DATA) - 1)


def test_a_body_without_end_is_cut(server: FileServer) -> None:
    stopped = threading.Event()

    def pour(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.end_headers()
        try:
            while True:
                request.wfile.write(b"x" * 10_000)
        except OSError:
            stopped.set()

    server.answers["/endless"] = pour
    assert "more than 100000 bytes" in refused(server.url("/endless"))
    assert stopped.wait(10)


def test_a_cut_body_is_no_file(server: FileServer) -> None:
    assert "does not speak HTTP properly" in refused(server.file("/f", DATA, Content_Length=str(len(DATA) + 1)))


def test_compression_is_refused(server: FileServer) -> None:
    bomb = gzip.compress(bytes(10**7))
    assert "compresses" in refused(server.file("/g", bomb, Content_Encoding="gzip"))
    assert fetch(server.file("/h", DATA, Content_Encoding="identity")) == DATA


def test_time_is_limited_as_a_whole(server: FileServer) -> None:
    left = threading.Event()

    def drip(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.end_headers()
        try:
            while not left.wait(0.02):
                request.wfile.write(b"x")
        except OSError:
            left.set()

    server.answers["/drip"] = drip
    assert "within 0.3 s (--media-fetch-timeout)" in refused(server.url("/drip"), web(media_fetch_timeout=0.3))
    assert left.wait(10)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_are_followed(server: FileServer, status: int) -> None:
    server.file("/there/file", DATA)
    server.redirect("/there/next", "file", status)
    assert fetch(server.redirect("/start", "/there/next", status)) == DATA


def test_redirects_are_counted(server: FileServer) -> None:
    server.file("/0", DATA)
    for n in range(1, 4):
        server.redirect(f"/{n}", f"/{n - 1}")
    assert fetch(server.url("/2"), web(max_media_redirects=2)) == DATA
    assert "allowed are 2 (--max-media-redirects)" in refused(server.url("/3"), web(max_media_redirects=2))
    assert "redirects too often" in refused(server.redirect("/loop", "/loop"))


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("http://127.0.0.2/", "not public"),
        ("http://169.254.169.254/latest/meta-data", "not public"),
        ("//[::1]/", "not public"),
        ("http://[::ffff:10.0.0.1]/", "not public"),
        ("file:///etc/passwd", "must be http or https"),
        ("data:,x", "must be http or https"),
        ("ftp://127.0.0.1/", "must be http or https"),
        ("http://user:secret@127.0.0.1/", "password"),
        ("http://[", "not a valid URL"),
        ("", "nowhere"),
    ],
)
def test_redirects_lead_nowhere_else(server: FileServer, target: str, why: str) -> None:
    message = refused(server.redirect("/away", target))
    assert why in message
    assert not any(inside in message for inside in ("127.0.0", "169.254", "::", "10.0.0", "passwd", "secret"))


@pytest.mark.parametrize(
    "url",
    ["http://", "http:///a", "http:a", "https://?", "http://[::1", "http://a b/", "http://a%2eb/", "http://h:0/",
     "http://h:65536/", "http://h:x/", "http://\0/", "http://a\n/", "http://[fe80::1%25lo]/", "http://" + "a" * 300,
     "http://" + "a" * 9000, "ftp://example.org/", "file:///etc/passwd", "a.png", "", "http://user@example.org/",
     "http://user:pass@example.org/", "http://:pass@example.org/", "http://127.0.0.1\\@example.org/", "http://１２７.0.0.1/"],
)  # fmt: skip
def test_what_is_no_plain_url_is_refused(url: str) -> None:
    names = Names()
    refused(url, web(names))
    assert names.asked == []


PRIVATE = ["10.0.0.1", "127.0.0.1", "169.254.169.254", "192.168.0.1", "::1", "fd00::1", "::ffff:127.0.0.1", "0.0.0.0"]


@pytest.mark.parametrize("address", PRIVATE)
def test_names_that_lead_inside_are_refused(server: FileServer, address: str) -> None:
    before = len(server.seen)
    message = refused(server.url("/", "media.test"), web(Names(media_test=[[address]]), allowed_media_networks=()))
    assert "not public" in message
    assert address not in message
    assert len(server.seen) == before


def test_one_bad_address_of_several_is_enough(server: FileServer) -> None:
    names = Names(media_test=[["127.0.0.1", "127.0.0.2"]])
    assert "not public" in refused(server.url("/", "media.test"), web(names))


def test_the_address_that_was_checked_is_the_one_that_is_used(server: FileServer) -> None:
    """A name that changes its mind after the check is not asked again; after a redirect it is, and checked again."""
    server.file("/a", DATA)
    names = Names(media_test=[["127.0.0.1"], ["10.0.0.1"]])
    assert fetch(server.url("/a", "media.test"), web(names)) == DATA
    assert names.asked == ["media.test"]
    assert server.seen[-1][1]["host"] == f"media.test:{server.port}"
    server.redirect("/again", server.url("/a", "media.test"))
    names = Names(media_test=[["127.0.0.1"], ["10.0.0.1"]])
    assert "not public" in refused(server.url("/again", "media.test"), web(names))


def test_a_dead_address_is_passed_over(server: FileServer) -> None:
    server.file("/a", DATA)
    names = Names(media_test=[["127.0.0.2", "127.0.0.1"]])
    assert fetch(server.url("/a", "media.test"), web(names, allowed_media_networks=("127.0.0.0/30",))) == DATA


def spellings(address: bytes) -> st.SearchStrategy[str]:
    """The ways in which the C library takes an IPv4 address: one to four numbers, each in one of three bases."""
    number = int.from_bytes(address, "big")

    def parts(count: int) -> list[int]:
        bits = 8 * (5 - count)
        return [*address[: count - 1], number & ((1 << bits) - 1)]

    bases = st.sampled_from(["{:d}", "0{:o}", "0x{:x}", "0X{:X}", "0x000{:x}"])
    return st.integers(1, 4).flatmap(
        lambda n: st.tuples(*[bases.map(lambda b, p=p: b.format(p)) for p in parts(n)]).map(".".join)
    )


INSIDE = st.sampled_from(
    ["127.0.0.1", "10.20.30.40", "169.254.169.254", "192.168.1.1", "172.16.5.4", "100.100.100.200"]
)


@settings(max_examples=60, deadline=None)
@given(INSIDE.flatmap(lambda a: spellings(socket.inet_aton(a))), st.sampled_from(["", "."]))
def test_every_spelling_of_an_address_is_seen_through(host: str, dot: str) -> None:
    """With this machine's own resolver."""
    refused(f"http://{host}{dot}:9/", web(allowed_media_networks=()))


def test_this_machine_resolves_spellings_to_what_they_mean() -> None:
    resolver = Resolver()
    for host in ("2130706433", "0x7f.1", "0177.0.0.01", "127.1", "localhost"):
        assert asyncio.run(resolver(host, 80))[0] in ("127.0.0.1", "::1")
    resolver.close()


def test_names_that_nobody_answers_for_hold_up_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answered.wait(30) and [])

    async def many() -> None:
        source = web(media_fetch_timeout=0.3)
        fetches = [source.fetch("http://media.test/", param="image", max_bytes=9) for _ in range(RESOLVING_THREADS + 9)]
        waiting = asyncio.gather(*fetches, return_exceptions=True)
        assert await asyncio.to_thread(lambda: "other work") == "other work"
        assert all("within 0.3 s" in str(error) for error in await waiting)
        await source.aclose()

    try:
        asyncio.run(many())
    finally:
        answered.set()


@pytest.mark.parametrize("name", ["does-not-exist.invalid", "a" * 70 + ".invalid", "a..invalid"])
def test_a_name_that_does_not_exist(name: str) -> None:
    refused(f"http://{name}/")


def test_nobody_listens() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        assert "no connection" in refused(f"http://127.0.0.1:{closed.getsockname()[1]}/")


@pytest.mark.parametrize(
    ("domains", "host", "allowed"),
    [
        (("media.test",), "media.test", True),
        (("MEDIA.test.",), "media.TEST", True),
        (("media.test",), "media.test.", True),
        (("media.test",), "a.media.test", False),
        (("media.test",), "xmedia.test", False),
        (("media.test",), "media.test.evil", False),
        (("*.media.test",), "a.b.media.test", True),
        (("*.media.test",), "media.test", False),
        (("*.test",), "xtest", False),
        (("münchen.test",), "xn--mnchen-3ya.test", True),
        (("127.0.0.1",), "127.0.0.1", True),
    ],
)
def test_allowed_domains(server: FileServer, domains: tuple[str, ...], host: str, allowed: bool) -> None:
    server.file("/a", DATA)
    names = Names()
    names.names = {host.lower(): [["127.0.0.1"]]}
    source = web(names, allowed_media_domains=domains)
    if allowed:
        assert fetch(server.url("/a", host), source) == DATA
    else:
        assert "--allowed-media-domains" in refused(server.url("/a", host), source)
        assert names.asked == []


def test_allowed_domains_hold_after_a_redirect(server: FileServer) -> None:
    server.redirect("/away", server.url("/a", "other.test"))
    names = Names(media_test=[["127.0.0.1"]], other_test=[["127.0.0.1"]])
    source = web(names, allowed_media_domains=("media.test",))
    assert "--allowed-media-domains" in refused(server.url("/away", "media.test"), source)


def test_an_allowed_domain_may_still_not_lead_inside(server: FileServer) -> None:
    names = Names(media_test=[["127.0.0.1"]])
    source = web(names, allowed_media_domains=("media.test",), allowed_media_networks=())
    assert "not public" in refused(server.url("/a", "media.test"), source)


@pytest.mark.parametrize("domain", ["", "*", "https://a.org", "a.org/", "a.org:80", "a b", "u@a.org", "*.*.org", "*."])
def test_a_domain_that_is_none_is_refused_at_the_start(domain: str) -> None:
    with pytest.raises(ConfigError, match="allowed_media_domains"):
        web(allowed_media_domains=(domain,))


def test_fetching_can_be_turned_off(server: FileServer) -> None:
    assert "not fetched" in refused(server.file("/a", DATA), web(media_fetch=False))


def test_the_environment_has_no_say(server: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert fetch(server.file("/a", DATA)) == DATA


def test_cookies_and_referers_are_not_passed_on(server: FileServer) -> None:
    server.file("/a", DATA)
    server.file("/cookie", b"", 302, Location="/a", Set_Cookie="a=b")
    fetch(server.url("/cookie"))
    assert set(server.seen[-1][1]) == {"host", "user-agent", "accept", "accept-encoding"}


def test_tls_is_verified_against_the_name() -> None:
    trusted = ssl.create_default_context(cafile=str(CERTIFICATE))
    names = Names(media_test=[["127.0.0.1"]], other_test=[["127.0.0.1"]])
    with running(FileServer(tls=True)) as server:
        server.file("/a", DATA)
        assert fetch(server.url("/a", "media.test", "https"), web(names, trusted)) == DATA
        assert "no connection" in refused(server.url("/a", "other.test", "https"), web(names, trusted))
        for nobody in (None, ssl.create_default_context()):
            assert "no connection" in refused(server.url("/a", "media.test", "https"), web(names, nobody))
        assert len(server.seen) == 1


def test_leaving_ends_the_fetch(server: FileServer) -> None:
    started, left = threading.Event(), threading.Event()

    def pour(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.end_headers()
        try:
            while not left.wait(0.01):
                request.wfile.write(b"x")
                started.set()
        except OSError:
            left.set()

    server.answers["/wait"] = pour

    async def leave() -> None:
        task = asyncio.create_task(web().fetch(server.url("/wait"), param="image", max_bytes=10**6))
        await asyncio.to_thread(started.wait, 10)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert await asyncio.to_thread(left.wait, 10)

    asyncio.run(leave())


def test_what_failed_takes_no_place(server: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused, cut and late fetches leave their connections to others."""
    monkeypatch.setattr(polymux.media.web, "MAX_CONNECTIONS", 1)
    server.file("/a", DATA)
    server.redirect("/inside", "http://10.0.0.1/")
    left = threading.Event()
    server.answers["/late"] = lambda request: left.wait(30) and None

    async def many() -> bytes:
        source = web(media_fetch_timeout=2.0)
        for url in ("http://10.0.0.1/", server.url("/inside"), server.url("/a"), server.url("/late")):
            with pytest.raises(InvalidRequestError):
                await source.fetch(url, param="image", max_bytes=9)
        try:
            return await source.fetch(server.url("/a"), param="image", max_bytes=10**6)
        finally:
            await source.aclose()

    try:
        assert asyncio.run(many()) == DATA
    finally:
        left.set()
