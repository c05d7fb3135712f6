"""https with a certificate of one's own, and clients that must show one."""

from __future__ import annotations

import contextlib
import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest
from fake_omni import FakeOmni
from live_server import exchange, listening, request

from polymux.errors import ConfigError
from polymux.knobs import build
from polymux.server.run import http_config
from polymux.server.state import ServerState
from polymux.server_config import ServerConfig

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """cert.pem and key.pem, for the address 127.0.0.1 and signed by itself; and the key with a password."""
    made = tmp_path_factory.mktemp("tls")
    openssl = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "2",
    ]
    names = ["-subj", "/CN=polymux test", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(
        [*openssl, *names, "-keyout", "key.pem", "-out", "cert.pem"], cwd=made, check=True, capture_output=True
    )
    locked = ["openssl", "ec", "-aes256", "-passout", "pass:secret", "-in", "key.pem", "-out", "locked.pem"]
    subprocess.run(locked, cwd=made, check=True, capture_output=True)
    (made / "both.pem").write_text((made / "cert.pem").read_text() + (made / "key.pem").read_text())
    return made


def flags(folder: Path, **names: str) -> dict[str, Any]:
    return {f"ssl_{name}": str(folder / file) for name, file in names.items()}


def trusting(folder: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(folder / "cert.pem"))


async def status_of(port: int, tls: ssl.SSLContext | None) -> int:
    """0: no answer, however that shows."""
    with contextlib.suppress(ssl.SSLError, ConnectionResetError):
        return (await exchange(port, request(), tls=tls)).status
    return 0


@pytest.mark.parametrize("files", [{"certfile": "cert.pem", "keyfile": "key.pem"}, {"certfile": "both.pem"}])
async def test_https(folder: Path, files: dict[str, str]) -> None:
    async with listening(**flags(folder, **files)) as port:
        assert (await exchange(port, request(), tls=trusting(folder))).status == 200
        with pytest.raises(ssl.SSLCertVerificationError):
            await exchange(port, request(), tls=ssl.create_default_context())
        assert await status_of(port, None) == 0  # plain http


async def test_clients_must_show_a_certificate(folder: Path) -> None:
    async with listening(**flags(folder, certfile="both.pem", ca_certs="cert.pem")) as port:
        known = trusting(folder)
        known.load_cert_chain(str(folder / "both.pem"))
        assert (await exchange(port, request(), tls=known)).status == 200
        assert await status_of(port, trusting(folder)) == 0


@pytest.mark.parametrize(
    "files",
    [
        {"certfile": "missing.pem"},
        {"certfile": "cert.pem"},
        {"certfile": "cert.pem", "keyfile": "locked.pem"},
        {"certfile": "key.pem"},
        {"certfile": "both.pem", "ca_certs": "missing.pem"},
    ],
)
def test_files_that_do_not_work_are_named(folder: Path, files: dict[str, str]) -> None:
    state = ServerState(FakeOmni(), build(ServerConfig, flags(folder, **files)))
    with pytest.raises(ConfigError) as caught:
        http_config(state)
    assert all(name in caught.value.message for name in files.values())


@pytest.mark.parametrize("name", ["ssl_keyfile", "ssl_ca_certs"])
def test_a_flag_that_would_do_nothing_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="--ssl-certfile"):
        build(ServerConfig, {name: "x.pem"})
