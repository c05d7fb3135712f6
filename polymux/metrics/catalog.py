"""Every metric, defined once: its name, its labels, its buckets and what it means.

The instruments, docs/metrics.md and the test of the dashboard are made from these definitions. Units are seconds and
bytes. Labels take few values, which are known beforehand: never a prompt, an id or anything else that a client chooses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PREFIX = "polymux:"
MODEL = ("model_name",)
STAGE = ("model_name", "stage", "replica")

LATENCY_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0)
RUN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TRANSFER_S = (0.00001, 0.0001, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0)
FIRST_S = (0.01, 0.025, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)
NEXT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
SILENCE_S = (0.0, *NEXT_S)
FACTOR = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0, 1.25, 1.5, 2.0, 5.0, 10.0)
CHUNK_BYTES = tuple(1024.0 * 4**n for n in range(10))
BATCH = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
HTTP_S = (0.005, 0.01, 0.025, 0.05, *LATENCY_S[1:])


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One metric. A counter's series end in `_total`, a histogram's in `_bucket`, `_sum` and `_count`."""

    name: str  # without these ends
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = MODEL
    buckets: tuple[float, ...] = ()

    @property
    def series(self) -> tuple[str, ...]:
        """The names of its samples."""
        match self.kind:
            case "counter":
                return (f"{self.name}_total",)
            case "gauge":
                return (self.name,)
        return tuple(self.name + end for end in ("_bucket", "_sum", "_count"))


def _counter(name: str, help: str, labels: tuple[str, ...] = MODEL) -> Spec:
    return Spec(name=PREFIX + name, kind="counter", help=help, labels=labels)


def _gauge(name: str, help: str, labels: tuple[str, ...] = MODEL) -> Spec:
    return Spec(name=PREFIX + name, kind="gauge", help=help, labels=labels)


def _histogram(name: str, help: str, buckets: tuple[float, ...], labels: tuple[str, ...] = MODEL) -> Spec:
    return Spec(name=PREFIX + name, kind="histogram", help=help, labels=labels, buckets=buckets)


RUNNING = _gauge("num_requests_running", "Requests that the stage works on.")
WAITING = _gauge("num_requests_waiting", "Requests that wait for a place in flight.")
REQUESTS = _counter("requests", "Requests that have ended, by outcome.", (*MODEL, "outcome"))
LATENCY = _histogram(
    "e2e_request_latency_seconds", "From the admission of a request to its output, of completed requests.", LATENCY_S
)
QUEUE = _histogram(
    "request_queue_time_seconds",
    "From arrival in the stage to the start, of completed requests.",
    LATENCY_S,
)
PHASES = _histogram(
    "request_phase_time_seconds",
    "A completed request's component calls, by phase. A call that was merged counts in full for each request in it.",
    LATENCY_S,
    (*MODEL, "phase"),
)
STEP = _histogram(
    "request_step_time_seconds", "A denoising step of a completed request: its denoise phase over its steps.", RUN_S
)
OUTPUTS = _counter("outputs", "Outputs that completed requests were made of.", (*MODEL, "modality"))
IMAGES = _counter("images", "Pictures made; the frames of videos are not among them.")
FRAMES = _counter("frames", "Frames of videos made.")
PIXELS = _counter("pixels", "Pixels of pictures and frames made.")
AUDIO = _counter("audio_seconds", "Seconds of sound made.")

FIRST_TEXT = _histogram(
    "time_to_first_token_seconds", "From the admission of a request to the first piece of its text.", FIRST_S
)
NEXT_TEXT = _histogram(
    "inter_token_latency_seconds",
    "From one piece of a request's text to the next one. A piece is a token, or the few that make a character.",
    NEXT_S,
)
FIRST_SOUND = _histogram(
    "time_to_first_audio_seconds", "From the admission of a request to the first piece of its sound.", FIRST_S
)
NEXT_SOUND = _histogram("inter_audio_chunk_seconds", "From one piece of a request's sound to the next one.", NEXT_S)
REAL_TIME = _histogram(
    "audio_real_time_factor",
    "From the admission of a completed request to its end, for each second of the sound that came in pieces.",
    FACTOR,
)
SILENCE = _histogram(
    "audio_underrun_seconds",
    "Silence in a completed request's sound for somebody who plays it from its first piece on, as pieces come.",
    SILENCE_S,
)
UNDERRUNS = _counter("audio_underruns", "Times that they had nothing to play before the end.")
CONTINUITY = _counter(
    "audio_streams", "Completed requests with sound in pieces, by whether they heard it without a break.",
    (*MODEL, "continuity"),
)  # fmt: skip

EDGE = (*MODEL, "from_stage", "to_stage")
TRANSFER_BYTES = _counter("transfer_bytes", "Tensors handed from stage to stage.", EDGE)
TRANSFER_SIZE = _histogram("transfer_chunk_bytes", "The size of a chunk that is handed on.", CHUNK_BYTES, EDGE)
TRANSFER_SECONDS = _histogram(
    "transfer_seconds", "A chunk's way from stage to stage: the time to put it there and to get it.", TRANSFER_S, EDGE
)

READY = _gauge("stage_ready", "1 if a generation would work now, else 0.", STAGE)
RESTARTS = _counter("stage_restarts", "Times that the stage's process was replaced.", STAGE)
STEPS = _counter("denoise_steps", "Denoising steps, each request's counted.", STAGE)
RUN_SECONDS = _histogram(
    "component_run_seconds",
    "Runs of a component. One run answers one call, or merged calls of several requests.",
    RUN_S,
    (*STAGE, "component", "phase"),
)
BATCH_SIZE = _histogram(
    "component_batch_size",
    "Calls that one run of a component answered.",
    BATCH,
    (*STAGE, "component", "phase"),
)
OFFLOAD_BYTES = _counter("offload_bytes", "Weights moved from the host to the device.", (*STAGE, "component"))
OFFLOAD_LATE = _counter(
    "offload_late_blocks", "Streamed blocks that nobody had asked for before they were needed.", (*STAGE, "component")
)
CACHE_QUERIES = _counter("cache_queries", "Times that something was looked for in a cache.", (*STAGE, "cache"))
CACHE_HITS = _counter("cache_hits", "Times that it was there.", (*STAGE, "cache"))
KV_USAGE = _gauge(
    "kv_cache_usage", "Share of the cache of keys and values that running requests have, from 0 to 1.", STAGE
)
PREEMPTIONS = _counter(
    "preemptions", "Requests that gave back their place in the cache of keys and values, to be computed again.", STAGE
)
DEVICE_MEMORY = _gauge(
    "device_memory_bytes", "Memory of the accelerator that the stage's process has.", (*STAGE, "kind")
)
HOST_MEMORY = _gauge("host_memory_bytes", "Memory of the host that the stage's process has (its resident set).", STAGE)

HTTP_REQUESTS = _counter("http_requests", "HTTP requests that have ended.", ("method", "route", "status"))
HTTP_SECONDS = _histogram(
    "http_request_duration_seconds", "From the begin of an HTTP request to the end of its answer.", HTTP_S, ("route",)
)

REQUEST_METRICS = (
    *(RUNNING, WAITING, REQUESTS, LATENCY, QUEUE, PHASES, STEP, OUTPUTS, IMAGES, FRAMES, PIXELS, AUDIO),
    *(FIRST_TEXT, NEXT_TEXT, FIRST_SOUND, NEXT_SOUND, REAL_TIME, SILENCE, UNDERRUNS, CONTINUITY),
)
STAGE_METRICS = (
    *(READY, RESTARTS, STEPS, RUN_SECONDS, BATCH_SIZE, OFFLOAD_BYTES, OFFLOAD_LATE, CACHE_QUERIES, CACHE_HITS),
    *(KV_USAGE, PREEMPTIONS, DEVICE_MEMORY, HOST_MEMORY),
    *(TRANSFER_BYTES, TRANSFER_SIZE, TRANSFER_SECONDS),
)
HTTP_METRICS = (HTTP_REQUESTS, HTTP_SECONDS)
ALL = (*REQUEST_METRICS, *STAGE_METRICS, *HTTP_METRICS)

LABELS = {  # what a label says, and which values it takes
    "model_name": "the name that clients use for the model",
    "stage": "a stage of the model, by number, from `0`",
    "replica": "a replica of the stage, by number, from `0`",
    "from_stage": "the stage that hands on",
    "to_stage": "the stage that gets it",
    "outcome": "`completed`; `failed`: a fault of the model or its process; `aborted`: the client left, or the "
    "request's time was over (504); `refused`: the request is wrong (4xx), there is no room (429) or the model is not "
    "ready (503)",
    "phase": "`encode`, `denoise`, `decode`",
    "modality": "`image`, `video`, `audio`, `text`",
    "continuity": "`unbroken`, `broken`: there was nothing to play at some time before the end",
    "component": "a component of the pipeline, such as `text_encoder`, `transformer`, `vae`",
    "cache": "`runtime_cache`: final weights on disk, looked for once per denoiser when the model is loaded; "
    "`prompt_cache`: results of encoders, looked for at every call of one; `first_block`: calls of a denoiser, and "
    "those of which only the first block ran; `cuda_graphs`: calls of a denoiser that may be graphs; "
    "`prefix_cache`: full blocks of prompts, looked for when a request begins",
    "kind": "`allocated`: in use; `reserved`: with what the allocator keeps; `peak`: the most that was in use",
    "method": "the HTTP method, or `WEBSOCKET`; `other` for one that is not a usual one",
    "route": "the route's template, such as `/v1/images/generations`; `none` if the request reached no route",
    "status": "the HTTP status; `499`: the client left before there was an answer",
}
