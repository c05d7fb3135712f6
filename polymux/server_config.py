"""The knobs of the server: how clients reach it, what they may bring, and what it keeps for them.

Machinery and rules are those of `polymux.config`.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field

from polymux.errors import ConfigError
from polymux.knobs import Checked, knob


@dataclass(frozen=True, kw_only=True)
class FilesConfig(Checked):
    """Files: pictures that clients fetch by a URL"""

    image_url_ttl: float = knob(3600.0, "seconds that the URL of a picture works", minimum=1)
    image_url_bytes: int = knob(
        256 * 2**20, "bytes of the pictures that are kept for their URLs, in memory; the oldest go first", minimum=1024
    )
    public_url: str | None = knob(
        None, "where clients reach the server, for those URLs (default: where the request was sent to)", metavar="URL"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.public_url is not None and not _PUBLIC_URL.fullmatch(self.public_url):
            what = f"{self.public_url!r}: must be http(s)://HOST[:PORT][/PATH]"
            raise ConfigError(f"public_url={what}", param="public_url")


_PUBLIC_URL = re.compile(r"https?://[^/?#@\s]+(?:/[^?#\s]*)?")


@dataclass(frozen=True, kw_only=True)
class MediaConfig(Checked):
    """Media: what requests may bring, and from where it may be fetched"""

    max_media_bytes: int = knob(32 * 2**20, "bytes of one file that a request brings or names", minimum=1024)
    max_input_image_size: int = knob(
        7680 * 4320, "pixels of one input picture", minimum=1, maximum=178_956_970
    )  # more, and Pillow refuses by itself
    max_total_media_bytes: int = knob(
        4 * 2**30, "bytes of the decoded media of all requests under way; more are refused with 503", minimum=1024
    )
    media_fetch: bool = knob(True, "fetch nothing that a request names by an http(s) URL", flag="--no-media-fetch")
    media_fetch_timeout: float = knob(15.0, "seconds that one fetch may take, redirects included", minimum=0.1)
    max_media_redirects: int = knob(5, "redirects that one fetch follows", minimum=0, maximum=20)
    allowed_media_domains: tuple[str, ...] = knob(
        (), "fetch from these hosts only; *.HOST: from all below it (default: from any)", metavar="HOST"
    )
    allowed_media_networks: tuple[str, ...] = knob(
        (), "networks that are fetched from although they are private, such as 10.1.0.0/16", metavar="NETWORK"
    )
    allowed_local_media_path: str | None = knob(
        None, "folder whose files requests may name (default: none)", metavar="DIR"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for network in self.allowed_media_networks:
            try:
                ipaddress.ip_network(network)
            except ValueError as error:
                raise ConfigError(f"allowed_media_networks: {error}", param="allowed_media_networks") from None


@dataclass(frozen=True, kw_only=True)
class HttpConfig(Checked):
    """Connections: what they may cost, and how long they may take"""

    max_connections: int = knob(1000, "open connections; more are refused with 503", minimum=1)
    max_header_bytes: int = knob(16384, "bytes of a request's line and headers", minimum=1024)
    max_body_bytes: int = knob(32 * 2**20, "bytes of a request body", minimum=1024)
    max_total_body_bytes: int = knob(
        2**30, "bytes of the bodies of all requests under way; more are refused with 503", minimum=1024
    )
    max_json_depth: int = knob(32, "levels of a JSON body", minimum=2, maximum=100)
    max_json_values: int = knob(10_000, "values in a JSON body", minimum=100)
    receive_timeout: float = knob(
        60.0, "seconds that a request's headers, and then its body, may take to arrive", minimum=0.1
    )
    send_timeout: float = knob(60.0, "seconds that a client may take nothing of its answer", minimum=0.1)
    speech_idle_timeout: float = knob(
        30.0, "seconds that a WebSocket for speech may stay open without a message when nothing is spoken", minimum=0.1
    )
    realtime_idle_timeout: float = knob(
        600.0, "seconds that a session of /v1/realtime may stay open without a message when nothing is answered",
        minimum=0.1,
    )  # fmt: skip
    request_timeout: float | None = knob(
        None,
        "seconds until a request that is not done is given up (default: only those of x-request-timeout)",
        minimum=0.1,
    )


@dataclass(frozen=True, kw_only=True)
class AccessConfig(Checked):
    """Access: who may use the server, from which pages, and whether the line is encrypted"""

    api_key: tuple[str, ...] = knob(
        (), "a key that requests must bring; others on this machine can see it, as they cannot in --api-key-file or "
        "POLYMUX_API_KEY", metavar="KEY", secret=True
    )  # fmt: skip
    api_key_file: str | None = knob(None, "file of keys, one a line", metavar="FILE")
    metrics_without_api_key: bool = knob(False, "GET /metrics needs no key")
    cors_allow_origins: tuple[str, ...] = knob(
        (), "origins, such as https://example.com, whose pages may use the server; *: any", metavar="ORIGIN"
    )
    ssl_certfile: str | None = knob(None, "certificate chain; the server then speaks https", metavar="FILE")
    ssl_keyfile: str | None = knob(None, "private key, if it is not in the file of the certificate", metavar="FILE")
    ssl_ca_certs: str | None = knob(None, "clients must show a certificate of one of these CAs", metavar="FILE")

    def __post_init__(self) -> None:
        super().__post_init__()
        for origin in self.cors_allow_origins:
            if not _ORIGIN.fullmatch(origin):
                what = f"{origin!r}: must be SCHEME://HOST or SCHEME://HOST:PORT in lower case, null, or *"
                raise ConfigError(f"cors_allow_origins: {what}", param="cors_allow_origins")
        for name in ("ssl_keyfile", "ssl_ca_certs"):
            if getattr(self, name) is not None and self.ssl_certfile is None:
                raise ConfigError(f"--{name.replace('_', '-')} acts only with --ssl-certfile", param=name)


_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\sA-Z]+|null|\*")


@dataclass(frozen=True, kw_only=True)
class AdapterFilesConfig(Checked):
    """Adapter files: which LoRA files clients may use"""

    allowed_lora_path: tuple[str, ...] = knob((), "folders whose LoRA files requests may name", metavar="DIR")


@dataclass(frozen=True, kw_only=True)
class VideoConfig(Checked):
    """Videos: where jobs and their files are kept, how long, and how many (docs/video.md)"""

    video_dir: str | None = knob(
        None, "folder of video jobs and their files (default: in the user's data folder)", metavar="DIR"
    )
    video_ttl: float = knob(86400.0, "seconds that an ended job and its file are kept; 0: for ever", minimum=0)
    video_max_jobs: int = knob(1000, "jobs that are kept; at as many, new ones are refused", minimum=1)
    video_max_bytes: int = knob(
        20 * 2**30, "bytes of all files that are kept; at as many, new jobs are refused", minimum=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.video_dir is not None and not self.video_dir.strip():
            raise ConfigError("video_dir='': must name a folder", param="video_dir")  # "" would be this very one


@dataclass(frozen=True, kw_only=True)
class VoiceConfig(Checked):
    """Voices: recordings that clients upload, to have texts spoken with their voices (docs/speech.md)"""

    voice_store: str | None = knob(
        None, "folder of uploaded voices (default: in the user's data folder)", metavar="DIR"
    )
    max_uploaded_voices: int = knob(1000, "voices that are kept; at as many, new ones are refused", minimum=0)
    max_voice_bytes: int = knob(10 * 2**20, "bytes of one uploaded recording", minimum=1024)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.voice_store is not None and not self.voice_store.strip():
            raise ConfigError("voice_store='': must name a folder", param="voice_store")


@dataclass(frozen=True, kw_only=True)
class ServerConfig(Checked):
    """Server: how clients reach it"""

    host: str = knob("127.0.0.1", "address to listen on")
    port: int = knob(8000, "port to listen on; 0 picks a free one and prints it", minimum=0, maximum=65535)
    served_model_name: str | None = knob(None, "name that clients use (default: the model as given)")
    log_requests: bool = knob(False, "log what requests ask for, their prompts too, shortened and without media")
    http: HttpConfig = field(default_factory=HttpConfig)
    access: AccessConfig = field(default_factory=AccessConfig)
    media: MediaConfig = field(default_factory=MediaConfig)
    video: VideoConfig = field(default_factory=VideoConfig)
    voices: VoiceConfig = field(default_factory=VoiceConfig)
    files: FilesConfig = field(default_factory=FilesConfig)
    adapter_files: AdapterFilesConfig = field(default_factory=AdapterFilesConfig)
