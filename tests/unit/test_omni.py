"""The Python entry over real stage processes: answers in order, errors where they belong, nothing left behind."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image

import polymux
from polymux.config import EngineConfig, stage_environment
from polymux.errors import (
    ConfigError,
    GenerationError,
    InvalidRequestError,
    NotReadyError,
    RequestAbortedError,
    StageDeadError,
)
from polymux.messages import LENGTH, frame, from_stage
from polymux.omni import AsyncOmni, Omni
from polymux.omni_output import OmniPreview, OmniRequestOutput, output_of, preview_of
from polymux.orchestrator.stage_client import ProcessStage
from polymux.request import (
    ArrayData,
    Finished,
    ImageData,
    OmniDiffusionSamplingParams,
    OutputChunk,
    Preview,
    Progress,
    Request,
    RequestMetrics,
)

MakeStage = Callable[[], ProcessStage]
Wait = Callable[[Callable[[], bool]], None]
FAKE_STAGE = Path(__file__).parent / "orchestrator" / "fake_stage.py"
ENDLESS = OmniDiffusionSamplingParams(num_inference_steps=10**6)


def config(**engine_args: Any) -> EngineConfig:
    return EngineConfig.from_flat(**{"model": "fake", "max_inference_steps": 10**6} | engine_args)


def stages() -> set[int]:
    """Stage processes that this process has now."""
    children = psutil.Process().children(recursive=True)
    return {
        c.pid for c in children if c.status() != psutil.STATUS_ZOMBIE and any("fake_stage" in a for a in c.cmdline())
    }


@pytest.fixture(scope="module")
def omni() -> Iterator[Omni]:
    command = (sys.executable, "-P", str(FAKE_STAGE))
    with Omni.from_config(config(max_num_seqs=2, max_queue=1), lambda: ProcessStage(command)) as omni:
        yield omni


def colour(output: OmniRequestOutput) -> int:
    (image,) = output.images
    assert isinstance(image, Image.Image)
    (value,) = set(np.asarray(image).flat)
    return int(value)


def test_one_prompt(omni: Omni) -> None:
    params = OmniDiffusionSamplingParams(seed=7, width=24, height=8, num_inference_steps=3)
    (output,) = omni.generate("a cat", params)
    assert output.error is None
    assert (output.prompt, output.modality, output.seeds, output.metrics.steps) == ("a cat", "image", [7], 3)
    assert colour(output) == 7
    assert isinstance(output.images[0], Image.Image)
    assert output.images[0].size == (24, 8)


def test_many_prompts_in_order_more_than_the_queue_holds(omni: Omni) -> None:
    params = [OmniDiffusionSamplingParams(seed=i, num_inference_steps=1 + i % 3) for i in range(12)]
    outputs = omni.generate(["a", {"prompt": "b"}] * 6, params, use_tqdm=True)
    assert [colour(output) for output in outputs] == list(range(12))
    assert [output.prompt for output in outputs] == ["a", "b"] * 6
    assert len({output.request_id for output in outputs}) == 12
    assert omni.generate([]) == []


def test_several_outputs_of_one_prompt(omni: Omni) -> None:
    (output,) = omni.generate("a", OmniDiffusionSamplingParams(seed=3, num_outputs_per_prompt=2))
    assert output.seeds == [3, 4]
    assert [np.asarray(image).max() for image in output.images] == [3, 4]


def test_latents(omni: Omni) -> None:
    (output,) = omni.generate("a", OmniDiffusionSamplingParams(seed=3, output_type="latent"))
    assert output.images == []
    assert [latent.dtype for latent in output.latents] == [np.float32]


def test_a_video_that_comes_in_parts(omni: Omni) -> None:
    before = omni.metrics.render().decode()
    (output,) = omni.generate("parts")
    after = omni.metrics.render().decode()
    frames = [float(text.partition("frames_total{")[2].split()[1]) for text in (before, after)]
    assert frames[1] - frames[0] == 6
    assert (output.error, output.modality, output.fps) == (None, "video", 8.0)
    assert output.videos[0].shape == (6, 8, 8, 3)
    assert output.videos[0][:, 0, 0, 0].tolist() == list(range(6))


def test_one_that_fails_does_not_hide_the_others(omni: Omni) -> None:
    wrong = OmniDiffusionSamplingParams(height=9)
    outputs = omni.generate(
        ["a", "fail", "a", "picky"], [OmniDiffusionSamplingParams(seed=1)] * 2 + [wrong] * 1 + [None]
    )
    assert [type(output.error) for output in outputs] == [
        type(None),
        GenerationError,
        InvalidRequestError,
        InvalidRequestError,
    ]
    assert [len(output.images) for output in outputs] == [1, 0, 0, 0]


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        (["a", {"promt": "b"}], None, "unknown key 'promt'"),
        (["a", 3], None, "prompt is a int"),
        (3, None, "prompts is a int"),
        (["a", "b"], [OmniDiffusionSamplingParams()], "1 sampling_params for 2 prompts"),
        ("a", {"height": 64}, "sampling_params is a dict"),
        (["a"], [{"height": 64}], "sampling_params is a dict"),
        ({"prompt": "a", "multi_modal_data": {"image": "cat.png"}}, None, "image is a str"),
    ],
)
def test_a_wrong_call_raises_before_any_work(omni: Omni, prompts: Any, params: Any, message: str) -> None:
    before = omni.metrics.render()
    with pytest.raises(InvalidRequestError, match=message):
        omni.generate(prompts, params)
    assert omni.metrics.render() == before


def test_calls_from_several_threads(omni: Omni) -> None:
    got: dict[int, int] = {}

    def work(seed: int) -> None:
        (output,) = omni.generate("a", OmniDiffusionSamplingParams(seed=seed, num_inference_steps=5))
        got[seed] = colour(output)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == {seed: seed for seed in range(8)}


def test_inside_a_running_event_loop(omni: Omni) -> None:
    async def cell_of_a_notebook() -> list[OmniRequestOutput]:
        return omni.generate("a", OmniDiffusionSamplingParams(seed=5))

    assert colour(asyncio.run(cell_of_a_notebook())[0]) == 5


def test_an_unknown_argument_names_the_known_ones() -> None:
    for kind in (Omni, AsyncOmni):
        with pytest.raises(ConfigError, match=r"unknown argument 'modell'; known are .*max_num_seqs"):
            kind(model="demo", modell="x")
        with pytest.raises(ConfigError, match="max_num_seqs=0: must be at least 1"):
            kind(model="demo", max_num_seqs=0)


def test_closing(make_stage: MakeStage) -> None:
    before = stages()
    one, two = (Omni.from_config(config(), make_stage) for _ in range(2))
    assert len(stages() - before) == 2
    one.close()
    one.close()
    assert len(stages() - before) == 1
    with pytest.raises(NotReadyError, match="closed"):
        one.generate("a")
    assert two.generate("a")[0].error is None
    two.close()
    assert stages() == before


def test_closing_under_work(make_stage: MakeStage, wait_until: Wait) -> None:
    omni = Omni.from_config(config(), make_stage)
    got: list[OmniRequestOutput] = []
    thread = threading.Thread(target=lambda: got.extend(omni.generate(["a", "b"], ENDLESS)))
    thread.start()
    wait_until(lambda: b'polymux:num_requests_running{model_name="fake"} 2.0' in omni.metrics.render())
    omni.close()
    thread.join(10)
    assert [type(output.error) for output in got] == [NotReadyError, NotReadyError]


def test_a_collected_one_leaves_nothing(make_stage: MakeStage) -> None:
    before = stages()
    omni = Omni.from_config(config(), make_stage)
    assert stages() != before
    del omni
    gc.collect()
    assert stages() == before
    assert not [thread for thread in threading.enumerate() if thread.name == "polymux" and not thread.daemon]


def test_one_that_does_not_start_leaves_nothing(make_stage: MakeStage, wait_until: Wait) -> None:
    before, threads = stages(), threading.active_count()
    with pytest.raises(StageDeadError, match="exit code 3"):
        Omni.from_config(config(model="exit"), make_stage)
    assert stages() == before
    wait_until(lambda: threading.active_count() <= threads)  # asyncio's own watcher of the child ends a moment later


def test_the_death_of_the_stage(make_stage: MakeStage, wait_until: Wait) -> None:
    with Omni.from_config(config(), make_stage) as omni:
        outputs = omni.generate(["a", "die", "a"], ENDLESS)
        assert {type(output.error) for output in outputs} == {StageDeadError}
        wait_until(lambda: omni.status == "dead")
        assert [type(output.error) for output in omni.generate(["a"])] == [NotReadyError]


def test_ctrl_c_aborts_what_is_under_way(make_stage: MakeStage, wait_until: Wait) -> None:
    with Omni.from_config(config(), make_stage) as omni:

        def interrupt() -> None:
            wait_until(lambda: b'polymux:num_requests_running{model_name="fake"} 1.0' in omni.metrics.render())
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            omni.generate("a", ENDLESS)
        wait_until(lambda: b'polymux:requests_total{model_name="fake",outcome="aborted"} 1.0' in omni.metrics.render())
        wait_until(lambda: b'polymux:num_requests_running{model_name="fake"} 0.0' in omni.metrics.render())
        assert omni.generate("a")[0].error is None


SCRIPTS = {
    "no main guard": "omni = make(); omni.generate('a'); omni.close()",
    "no close": "omni = make(); omni.generate('a')",
    "an exception": "omni = make(); raise SystemExit(0)",
    "a reference cycle": "omni = make(); omni.itself = omni; del omni",
    "os._exit": "omni = make(); os._exit(0)",
    "async without close": "asyncio.run(make_async().start())",
    "a fork that ends first": (
        "omni = make()\nif os.fork() == 0: sys.exit(0)\nos.wait()\nassert omni.generate('a')[0].error is None"
    ),
}


def script(body: str) -> str:
    return (
        textwrap.dedent(f"""
        import asyncio, os, sys
        from polymux.config import EngineConfig
        from polymux.omni import AsyncOmni, Omni
        from polymux.orchestrator.stage_client import ProcessStage
        class Named(ProcessStage):
            async def start(self):
                await super().start()
                print(self.pid, flush=True)
        config = EngineConfig.from_flat(model="fake", max_inference_steps=10**6)
        command = ({sys.executable!r}, "-P", {str(FAKE_STAGE)!r})
        def make(): return Omni.from_config(config, lambda: Named(command))
        def make_async(): return AsyncOmni.from_config(config, lambda: Named(command))
        """)
        + body
    )


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_leave_nothing(name: str, wait_until: Wait) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-c", script(SCRIPTS[name])],
        env=stage_environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    wait_until(lambda: gone(int(done.stdout)))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_killed_parent_leaves_nothing(number: signal.Signals, wait_until: Wait) -> None:
    body = "from polymux.request import OmniDiffusionSamplingParams as P\n"
    body += "omni = make(); omni.generate('a', P(num_inference_steps=10**6))"
    parent = subprocess.Popen(
        [sys.executable, "-c", script(body)], env=stage_environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.send_signal(number)
    assert parent.wait(10) != 0
    wait_until(lambda: gone(pid))
    parent.stdout.close()


def test_async_progress_and_output(make_stage: MakeStage) -> None:
    async def scenario() -> None:
        async with AsyncOmni.from_config(config(), make_stage) as omni:
            await omni.health()
            assert omni.capabilities is not None
            params = OmniDiffusionSamplingParams(seed=2, num_inference_steps=3)
            events = [event async for event in omni.generate("a", params, request_id="mine")]
            assert [event.step for event in events if isinstance(event, Progress)] == [1, 2, 3]
            assert isinstance(events[-1], OmniRequestOutput)
            assert events[-1].request_id == "mine"
            with pytest.raises(InvalidRequestError):
                await anext(omni.generate({"promt": "a"}))  # type: ignore[typeddict-unknown-key]
            assert b'polymux:requests_total{model_name="fake",outcome="refused"} 1.0' in omni.metrics.render()
        with pytest.raises(NotReadyError):
            await omni.health()

    asyncio.run(scenario())


def test_async_abort_and_leaving(make_stage: MakeStage) -> None:
    async def scenario() -> None:
        async with AsyncOmni.from_config(config(), make_stage) as omni:
            async for _ in omni.generate("a", ENDLESS):
                break  # left to the garbage collector
            with pytest.raises(RequestAbortedError):
                async for _ in omni.generate("a", ENDLESS, request_id="x"):
                    omni.abort("x")
            omni.abort("unknown")
            while b'outcome="aborted"} 2.0' not in omni.metrics.render():
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_a_stream_gives_parts_and_refuses_at_once(make_stage: MakeStage) -> None:
    async def scenario() -> None:
        async with AsyncOmni.from_config(config(), make_stage) as omni:
            with pytest.raises(InvalidRequestError):  # at once
                omni.stream("a", OmniDiffusionSamplingParams(width=7))
            # The stage sends a part when it hears that the one before is used up.
            *events, output = [event async for event in omni.stream("parts", request_id="r")]
            assert [event.start for event in events if isinstance(event, OutputChunk)] == list(range(6))
            assert isinstance(output, OmniRequestOutput) and output.videos == []

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_outputs_of_every_kind() -> None:
    def output(modality: Any, *media: Any, output_type: Any = "pil") -> OmniRequestOutput:
        params = OmniDiffusionSamplingParams(output_type=output_type)
        finished = Finished("r", modality, [list(media)], [1], RequestMetrics(), fps=8.0, sample_rate=16000)
        return output_of(Request(request_id="r", prompt="a", params=params), finished)

    picture = ImageData("RGB", 2, 1, bytes(6))
    frames, sound = ArrayData("uint8", (3, 1, 2, 3), bytes(18)), ArrayData("float32", (2, 5), bytes(40))
    assert len(output("image", picture, picture).images) == 2
    assert isinstance(output("image", ArrayData("float32", (1, 2, 3), bytes(24))).images[0], np.ndarray)
    both = output("video", frames, sound)
    assert (both.videos[0].shape, both.audio[0].shape, both.fps, both.sample_rate) == ((3, 1, 2, 3), (2, 5), 8.0, 16000)
    assert output("video", picture, picture).videos[0].shape == (2, 1, 2, 3)
    assert output("audio", sound).audio[0].shape == (2, 5)
    latent = output("video", ArrayData("float32", (4, 2), bytes(32)), output_type="latent")
    assert (len(latent.latents), latent.videos) == (1, [])


def test_a_preview_as_python_sees_it() -> None:
    message = frame(Preview("a", 1, 3, [ImageData("RGB", 2, 1, bytes(6))]))
    sent = from_stage.decode(message[LENGTH.size :])
    assert isinstance(sent, Preview)
    preview = preview_of(sent)
    assert (preview.request_id, preview.index, preview.step) == ("a", 1, 3)
    assert [image.size for image in preview.images] == [(2, 1)]


def test_public_names_without_torch() -> None:
    assert set(polymux.__all__) <= set(dir(polymux)) | {"AsyncOmni", "Omni", "OmniPreview", "OmniRequestOutput"}
    assert polymux.Omni is Omni
    assert polymux.OmniRequestOutput is OmniRequestOutput
    assert polymux.OmniPreview is OmniPreview
    with pytest.raises(AttributeError):
        polymux.nothing  # noqa: B018
    code = "import sys; from polymux import *; sys.exit(any(m in sys.modules for m in ('torch', 'diffusers')))"
    assert subprocess.run([sys.executable, "-c", code], env=stage_environment()).returncode == 0
