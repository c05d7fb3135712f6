"""What a family declares. A family declares, it does not act: generic code reads these fields.

Knows neither torch nor diffusers; pipelines are named by their class names.
"""

from __future__ import annotations

from dataclasses import dataclass

from polymux.families.step_caches import NOT_VALIDATED, StepCaches
from polymux.families.video_tokens import VideoTokens
from polymux.request import Modality


@dataclass(frozen=True, kw_only=True)
class Padding:
    """An argument whose length may differ between requests, and the mask that tells real from padded.

    `dim` is the dimension that is padded with zeros, at its end. `mask` names the argument that takes a mask of shape
    (batch, length); None if padded positions need no mask. `role`: which components it is an argument of. `cut`: the
    results have that length too, and each request gets its own part.
    """

    argument: str
    dim: int = 1
    mask: str | None = None
    role: str = "denoiser"
    cut: bool = False


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family of models.

    pipelines: class names in diffusers.
    tasks: what they are for, in the hub's words.
    merge: the roles whose calls of different requests may run as one ("encoder", "denoiser", "decoder"). Only what the
        parity tests prove may stand there; `unmerged_because` says why something is missing.
    collect_guidance: the calls that a step makes one after the other may run together.
    padding: arguments whose length may differ between merged calls.
    shared: arguments of the denoiser that are the same for all samples of a call although their form says otherwise.
    denoisers: components that are denoisers although their names do not tell.
    loops: parts that the pipeline has write token by token, by their own `generate`, and the modules inside them whose
        calls are captured: (part, paths). What lies above those runs in the session, on a copy of its own, so that what
        it keeps of a request reaches no other.
    blocks: the containers of the denoisers' blocks (lists of blocks, or single ones), in the order in which a forward
        runs them; needed where diffusers does not name the blocks' classes, or registers them in another order.
    refused: arguments that checkpoints ignore, or fail with, unless a flag in a component's config is set: (argument,
        component, flag). "" as component is the pipeline's own config, and as flag that the component is there; a flag
        may be "not FLAG", or several with " or " between.
    needed: arguments that checkpoints cannot do without if a flag is set, in the same form.
    ignored: arguments that the pipelines take, and make nothing of or fail with: (argument, why). They are refused.
    overruled: (argument, other): the other one, where given, decides what the argument says; both are refused.
    companions: arguments that act only beside another one: (argument, companion, value). A missing companion gets
        the value; None refuses the request.
    size: width and height, where the call cannot do without them, if a request names none.
    prompt_optional: requests may come without a prompt.
    size_multiple: height and width must be multiples of it; None: taken from the pipeline's autoencoder.
    area: an argument that overrules height and width, and gets their product.
    frames_multiple: num_frames - 1 must be a multiple of it.
    fps: frames per second of its videos.
    other_fps: the same, where a flag in a component's config holds: (component, flag, fps); "": the pipeline's config.
    longest: the attribute of the pipeline that says how many seconds of sound it makes, where it cuts what is longer.
    media: input media that every request must bring: (argument, how many items at most).
    optional_media: the same for media that a request may bring, where it is fewer than the usual sixteen.
    alpha: pictures have an alpha channel: input pictures keep theirs, and output pictures come with one.
    picture_sized: the call takes no size, and the output is as large as the input picture.
    picture_mark: what stands in a prompt for an input picture, with {} for its number from 1; every picture needs one.
    variations: with an empty prompt it makes variations of the input picture.
    streamed_decode: the component `vae` decodes in a loop over latent frames, each from those before it, and the
        pipeline does nothing with what it returns but `video_processor.postprocess_video`: frames may leave meanwhile.
    no_previews: why there can be no pictures of unfinished outputs, although the pipeline has all that it takes.
    unusable: what it means when the pipeline fails in a line with this word: (word, meaning). Then it is what a model
        inside it wrote that cannot be gone on with.
    step_caches: what is known of it for caches of denoising steps.
    video_tokens: where the tokens of a video are in its attention, which block-sparse attention must know.
    warmup: arguments of the warm-up generation, where generic ones would not do.
    """

    name: str
    pipelines: tuple[str, ...]
    modality: Modality
    tasks: tuple[str, ...]
    merge: frozenset[str] = frozenset({"encoder", "denoiser", "decoder"})
    unmerged_because: str | None = None
    collect_guidance: bool = True
    padding: tuple[Padding, ...] = ()
    shared: tuple[str, ...] = ()
    denoisers: tuple[str, ...] = ()
    loops: tuple[tuple[str, tuple[str, ...]], ...] = ()
    blocks: tuple[str, ...] = ()
    refused: tuple[tuple[str, str, str], ...] = ()
    needed: tuple[tuple[str, str, str], ...] = ()
    ignored: tuple[tuple[str, str], ...] = ()
    overruled: tuple[tuple[str, str], ...] = ()
    companions: tuple[tuple[str, str, str | None], ...] = ()
    size: tuple[int, int] | None = None
    prompt_optional: bool = False
    size_multiple: int | None = None
    area: str | None = None
    frames_multiple: int = 1
    fps: float | None = None
    other_fps: tuple[tuple[str, str, float], ...] = ()
    longest: str | None = None
    media: tuple[tuple[str, int], ...] = ()
    optional_media: tuple[tuple[str, int], ...] = ()
    alpha: bool = False
    picture_sized: bool = False
    picture_mark: str | None = None
    variations: bool = False
    streamed_decode: bool = False
    no_previews: str | None = None
    unusable: tuple[tuple[str, str], ...] = ()
    step_caches: StepCaches = NOT_VALIDATED
    video_tokens: VideoTokens | None = None
    warmup: tuple[tuple[str, str | int | float | bool], ...] = ()


# Of an encoder that is a causal language model: what follows a token does not change it.
CAUSAL_PROMPT = Padding(argument="input_ids", mask="attention_mask", role="encoder", cut=True)

NOTHING: frozenset[str] = frozenset()

UNKNOWN = Family(
    name="unknown",
    pipelines=(),
    modality="image",
    tasks=(),
    merge=NOTHING,
    unmerged_because="no declaration: nothing proves that its calls may be merged",
    collect_guidance=False,
    no_previews="no declaration: nothing proves that its unfinished outputs can be shown",
)
