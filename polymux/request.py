"""The nouns of a request: what is asked, how, and what comes back.

Plain data that crosses process borders as msgpack. Knows neither torch nor HTTP.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from polymux.errors import ErrorInfo
from polymux.parcel import Chunk, Consumed
from polymux.profile import Profile
from polymux.tools import CallFormat, ToolCall, ToolUse

Modality = Literal["image", "video", "audio", "text"]
FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True)
class LoRARequest:
    """An adapter to generate with. `path`: a .safetensors file or a folder with one, where the model runs."""

    path: str
    scale: float = 1.0
    component: str | None = None  # the denoiser that it is for, where there are two: transformer or transformer_2


@dataclass(frozen=True, kw_only=True)
class OmniDiffusionSamplingParams:
    """How to generate with a diffusion pipeline. None leaves a value to the pipeline's own default.

    A field that the pipeline does not take is an error, never ignored.
    """

    height: int | None = None  # pixels
    width: int | None = None  # pixels
    num_frames: int | None = None
    fps: float | None = None  # frames per second, for pipelines that are conditioned on it
    seconds: float | None = None  # of sound
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    guidance_scale_2: float | None = None  # of the low-noise denoiser, where there are two
    true_cfg_scale: float | None = None
    strength: float | None = None  # 0..1, how far an input image is changed
    seed: int | None = None  # None draws one; the output says which
    generator: Any = None  # torch.Generator whose state is used in place of a seed; not advanced
    num_outputs_per_prompt: int = 1  # output i is the one of seed + i
    negative_prompt: str | None = None
    sigmas: tuple[float, ...] | None = None
    timesteps: tuple[float, ...] | None = None
    max_sequence_length: int | None = None  # tokens of the prompt
    lora: tuple[LoRARequest, ...] = ()  # added up in this order
    enable_frame_interpolation: bool = False  # put frames between the frames of a video, and raise its rate as much
    frame_interpolation_exp: int = 1  # n frames become (n - 1) * 2^exp + 1
    frame_interpolation_scale: float = 1.0  # of the frames, where motion is estimated: below 1 is cheaper
    output_type: Literal["pil", "np", "latent"] = "pil"
    profile: bool = False  # tell with the output where the time went
    extra_args: dict[str, Any] = field(default_factory=dict)  # the pipeline's own further arguments

    @property
    def frame_factor(self) -> int:
        """How many times more frames per second come out than the model makes."""
        return 1 << self.frame_interpolation_exp if self.enable_frame_interpolation else 1


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to generate with a model that writes token by token, or speaks. None leaves a value to the checkpoint.

    A field that the model does not take is an error, never ignored.
    """

    voice: str | None = None  # one of the model's own
    ref_audio: Any = None  # (samples, samples per second) of a voice to speak with; travels as the request's medium
    ref_text: str | None = None  # what is said in ref_audio
    speaker_embedding: tuple[float, ...] | None = None  # a vector that stands for a voice, in place of `voice`
    language: str | None = None
    instructions: str | None = None  # how to speak
    speed: float | None = None  # 0.25..4: the finished sound is stretched in time, at the same pitch
    seed: int | None = None  # None draws one; the output says which
    seconds: float | None = None  # of sound, for models that make as much as is asked for
    max_new_tokens: int | None = None  # for each sentence; speech that needs more is cut there
    do_sample: bool | None = None
    temperature: float | None = None  # 0: no sampling
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None  # -2..2, of what was written before, by how often
    presence_penalty: float | None = None  # -2..2, of what was written before, once
    stop: tuple[str, ...] | None = None  # texts before which the answer ends
    guidance_scale: float | None = None
    json_schema: dict[str, Any] | None = None  # the text is JSON that fits it
    profile: bool = False  # tell with the output where the time went
    extra_args: dict[str, Any] = field(default_factory=dict)  # the model's own further arguments


# What travels between processes: modes of pictures with their channels, types of arrays with their bytes per item.
CHANNELS = {"L": 1, "RGB": 3, "RGBA": 4}
ITEM_BYTES = {"bool": 1, "uint8": 1, "int16": 2, "int32": 4, "int64": 8, "float16": 2, "float32": 4, "float64": 8}


class ImageData(msgspec.Struct, frozen=True, tag="image"):
    """A picture as raw pixels: `data` holds height x width pixels of PIL mode `mode`, one of CHANNELS."""

    mode: str
    width: int
    height: int
    data: bytes


class ArrayData(msgspec.Struct, frozen=True, tag="array"):
    """A C-contiguous array: frames (frames, height, width, channels), audio (channels, samples), latents."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes
    sample_rate: int | None = None  # samples per second, of audio that comes with a request
    fps: float | None = None  # frames per second, of a video that comes with a conversation


Media = ImageData | ArrayData


class Part(msgspec.Struct, frozen=True):
    """A piece of a message: a text, or the next one of the request's media of this kind."""

    kind: Literal["text", "image", "audio", "video"]
    text: str = ""


class Message(msgspec.Struct, frozen=True):
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    parts: list[Part]
    tool_calls: list[ToolCall] = []  # that the model made in this turn
    tool_call_id: str | None = None  # of the call that this is the result of


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt, or one conversation, with everything that is needed to answer it."""

    request_id: str
    prompt: str | None = None
    negative_prompt: str | None = None
    media: dict[str, list[Media]] = {}  # by the pipeline's argument name: image, mask_image, video, audio, ...
    params: OmniDiffusionSamplingParams = OmniDiffusionSamplingParams()
    sampling: SamplingParams | None = None  # in place of params, for models that take these
    partial_images: int = 0  # previews of each output while it is made; fewer if it has fewer steps, or is quicker
    generator_state: bytes | None = None  # of params.generator, which itself does not travel
    messages: list[Message] = []  # in place of a prompt, for models that answer
    modalities: tuple[Modality, ...] = ()  # of the answer; empty: the model's own
    tools: ToolUse | None = None  # functions that the answer may call
    session_id: str | None = None  # requests of one session may be kept at one replica


class RequestMetrics(msgspec.Struct, frozen=True):
    """Where the time of a request went, in seconds, and how much work it was.

    encode, denoise and decode are the seconds of the component calls that the request took part in; a merged call
    counts in full for each request in it.
    """

    queue: float = 0.0
    encode: float = 0.0
    denoise: float = 0.0
    decode: float = 0.0
    total: float = 0.0
    steps: int = 0
    text_tokens: int = 0  # of a text that was spoken
    prompt_tokens: int = 0  # of a conversation, with its media
    completion_tokens: int = 0  # of the text that was written
    audio_tokens: int = 0  # steps of the speech that goes with it


class Segment(msgspec.Struct, frozen=True):
    """A part of a transcript, said from `start` to `end` (seconds) of the sound."""

    start: float
    end: float
    text: str
    tokens: list[int]


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """A request has come this far. `total` is 0 while unknown."""

    request_id: str
    phase: Literal["queued", "encode", "denoise", "decode"]
    step: int
    total: int


class Preview(msgspec.Struct, frozen=True, tag="preview"):
    """What the model expects an output to become, as of one of its steps."""

    request_id: str
    index: int  # which of the request's outputs
    step: int
    media: list[Media]


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """A request is done: one entry of `outputs` and `seeds` per output, in order."""

    request_id: str
    modality: Modality
    outputs: list[list[Media]]  # usually of one medium; of several for layers, or frames with sound; see OutputChunk
    seeds: list[int | None]
    metrics: RequestMetrics
    fps: float | None = None
    sample_rate: int | None = None
    sound_seconds: float = 0.0  # of what came in SoundPieces
    text: str | None = None  # of models that write: all of it
    finish_reason: FinishReason | None = None  # length: there was no room for more
    segments: list[Segment] = []  # of a transcript
    language: str | None = None  # likewise, as the model heard it
    profile: Profile | None = None  # if it was asked for


class OutputChunk(msgspec.Struct, frozen=True, tag="chunk"):
    """Some rows of an array that is too large for one message. Comes before Finished, which does not hold the array.

    The chunks of an array come in order and without gaps. If one array of an output comes in chunks all of them do,
    sound before frames.
    """

    request_id: str
    output: int  # which output of the request
    medium: int  # which of the output's media
    shape: tuple[int, ...]  # of the whole array
    start: int  # the first row; rows are counted along the array's first axis
    rows: ArrayData


class SoundPiece(msgspec.Struct, frozen=True, tag="sound_piece"):
    """The next samples of a request's sound, which are all there is of them: Finished does not hold the sound."""

    request_id: str
    sentence: int  # which sentence of the text they are of
    samples: ArrayData  # (channels, samples), with their rate


class TextPiece(msgspec.Struct, frozen=True, tag="text_piece"):
    """What has been written since the last one; never half a character. Finished holds the whole text."""

    request_id: str
    text: str


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """A request ended without output."""

    request_id: str
    error: ErrorInfo


News = Progress | Preview | OutputChunk | SoundPiece | TextPiece  # what comes before the end of a request
Event = News | Finished | Failed | Chunk | Consumed


class Distribution(msgspec.Struct, frozen=True):
    """How many values fell into each bucket (the last one has no upper bound), and their sum."""

    counts: list[int]
    sum: float


class ComponentRuns(msgspec.Struct, frozen=True):
    """The runs of one component in one phase. A run answers one call, or several that were merged."""

    component: str
    phase: str
    batches: dict[int, int]  # runs, by how many calls each answered
    seconds: Distribution  # over `metrics.catalog.RUN_S`; of runs that the device has finished


class StageStats(msgspec.Struct, frozen=True, kw_only=True):
    """What a stage has done since its process started (totals) and is doing now. What is a dict or list of components
    or caches has those that were in use."""

    running: int = 0
    waiting: int = 0
    steps: int = 0  # denoising steps, each request's counted
    seconds: dict[str, float] = {}  # by phase, of ended sessions; a merged call counts in full for each request in it
    runs: list[ComponentRuns] = []
    offload_bytes: dict[str, int] = {}  # weights moved to the device, by component
    offload_late: dict[str, int] = {}  # streamed blocks that were fetched only when they were needed, by component
    cache_queries: dict[str, int] = {}  # by cache
    cache_hits: dict[str, int] = {}
    kv_blocks: int = 0  # of the cache of keys and values; 0: there is none
    kv_blocks_used: int = 0
    preemptions: int = 0  # requests that gave their blocks back, and were computed again
    device_memory: dict[str, int] = {}  # bytes: allocated, reserved, peak; empty on a CPU
    host_memory: int = 0  # bytes

    @property
    def calls(self) -> dict[str, int]:
        """Runs, by component."""
        return self._by_component(lambda size: 1)

    @property
    def merged(self) -> dict[str, int]:
        """Requests' calls that these answered, by component."""
        return self._by_component(lambda size: size)

    def _by_component(self, worth: Callable[[int], int]) -> dict[str, int]:
        totals: dict[str, int] = {}
        for runs in self.runs:
            total = sum(worth(size) * count for size, count in runs.batches.items())
            totals[runs.component] = totals.get(runs.component, 0) + total
        return totals


class Bounds(msgspec.Struct, frozen=True):
    """What a further argument of a model may be: a number from `low` to `high`, or true or false."""

    low: float = 0
    high: float = 0
    kind: Literal["number", "integer", "flag"] = "number"


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What the loaded model can do; sent by the stage when it is ready, used to check requests before any work."""

    family: str | None  # None: a pipeline that polymux has no declaration for
    pipeline: str
    modality: Modality
    arguments: tuple[str, ...]  # what the pipeline's call takes
    required: tuple[str, ...]  # of these, the ones without a default
    media: dict[str, int]  # media arguments and how many items each takes; required ones are in `required`
    size_multiple: int = 1
    min_inference_steps: int = 1
    frames_multiple: int = 1  # num_frames - 1 must be a multiple of it
    max_seconds: float | None = None  # of sound, where the pipeline would cut what is longer
    # Of height, width and num_frames, where the pipeline's call states them, and of a seed, where the operator does.
    defaults: dict[str, int] = {}
    fps: float | None = None  # of videos, unless a request says otherwise
    sample_rate: int | None = None  # of sound
    refused: dict[str, str] = {}  # arguments that this checkpoint would ignore, and why
    alpha: bool = False  # pictures have an alpha channel, those that come in and those that come out
    picture_sized: bool = False  # takes no size: what comes out is as large as the picture that came in
    picture_mark: str | None = None  # stands in a prompt for each picture; {} is its number, from 1
    variations: bool = False  # makes variations of a picture when the prompt is empty
    previews: bool = False  # if not, refused["partial_images"] says why
    merges: bool = False
    lora: bool = False  # whether requests may name adapters
    frame_interpolation: bool = False  # whether there is a network for it
    samples: bool = False  # takes SamplingParams, in place of those of diffusion
    chats: bool = False  # answers a conversation; `makes` says with what
    tool_calls: CallFormat | None = None  # how it writes calls of tools; None: its template takes none
    makes: tuple[Modality, ...] = ()  # that an answer may consist of; text comes always
    context: int | None = None  # tokens of a conversation and its answer together, where that is known
    hears_at: int | None = None  # samples per second of the sound that it takes
    sees_at: float | None = None  # frames per second of the video that it takes
    voices: tuple[str, ...] = ()  # of a model that speaks; the first one speaks unless a request names another
    languages: tuple[str, ...] = ()  # that a request may name
    timestamps: bool = False  # of a model that writes down what is said: whether its segments say when
    speaker_marks: tuple[str, ...] = ()  # in a text, they say who speaks from there on
    embedding_size: int | None = None  # values of a vector that stands for a voice; None: it takes none
    max_new_tokens: int | None = None  # of one sentence, or of the whole sound if it does not speak
    extra: tuple[str, ...] = ()  # of the arguments, those that extra_args may hold, where that is known
    bounds: dict[str, Bounds] = {}  # of some of those
    device: str = "cpu"
    dtype: str = "float32"
    parameters: int = 0
    features: tuple[str, ...] = ()  # what of polymux it can have, by the names in docs/compatibility.md
    quantized: dict[str, str] = {}  # components whose linear layers keep their weights in few bits, and how
    storage: str = ""  # where the weights are, why, and what that costs
    fixed_size: bool = False  # makes pictures of the default size, and no others
    answers: Capabilities | None = None  # of a model that makes pictures, and answers conversations with text too

    def asked_by(self, request: Request) -> Capabilities:
        """Those that a request is for: its answers', if it is a conversation or says that text is to be made."""
        text = bool(request.messages) or request.sampling is not None or "text" in request.modalities
        return self.answers if self.answers is not None and text else self

    @property
    def transcribes(self) -> bool:
        """Whether it writes down what is said in a sound."""
        return self.modality == "text" and self.samples and "audio" in self.required
