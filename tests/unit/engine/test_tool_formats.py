"""How a model writes calls of tools: told by its template, or by a flag; then they are held to it, and read like it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from polymux.config import EngineConfig
from polymux.engine.answering import load_answering
from polymux.errors import ConfigError, InvalidRequestError
from polymux.families.tool_templates import call_format
from polymux.request import Failed, Finished, Message, Part, Request, SamplingParams
from polymux.tool_reader import calls_in
from polymux.tools import CallFormat, Tool, ToolUse

pytest.importorskip("xgrammar")

LOOK = Tool("look", "looks", {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]})
USE = ToolUse((LOOK,), "required", parallel=False)
SAYS = "{{ messages[-1].content }}{% if tools %}{{ tools | tojson }} Respond with "
HERMES = SAYS + 'x {"name": <name>, "arguments": <args>} in <tool_call> and </tool_call>{% endif %}'
ELEMENTS = SAYS + "<tool_call><function=NAME><parameter=NAME>VALUE</parameter></function></tool_call>{% endif %}"
LEADING = SAYS + '{"name": function name, "parameters": dictionary of argument name and its value}.{% endif %}'
KEYS = SAYS + "<tool_call>name<arg_key>k</arg_key><arg_value>v</arg_value> arguments</tool_call>{% endif %}"
MARKED = SAYS + "[TOOL_CALLS]{% endif %}"
NONE = "{{ messages[-1].content }} <tool_call> arguments </tool_call>"


@pytest.mark.parametrize(
    ("template", "format"),
    [
        (HERMES, "hermes"), (ELEMENTS, "function_xml"), (LEADING, "llama3_json"), (KEYS, None), (MARKED, None),
        (NONE, None), (LEADING.replace('"', '\\"'), "llama3_json"),
    ],
)  # fmt: skip
def test_a_template_tells(template: str, format: CallFormat | None) -> None:
    assert call_format(template) == format


@pytest.mark.parametrize(
    ("template", "chosen", "format"),
    [
        (ELEMENTS, None, "function_xml"), (LEADING, None, "llama3_json"), (MARKED, "llama3_json", "llama3_json"),
        (KEYS, None, None), (NONE, "hermes", None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("decoding", ["paged", "generate"])
def test_calls_of_a_model(
    tiny_checkpoint: Callable[..., Path],
    tmp_path: Path,
    template: str,
    chosen: str | None,
    format: CallFormat | None,
    decoding: str,
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_checkpoint("qwen3-lm"), folder)
    (folder / "chat_template.jinja").write_text(template)
    config = EngineConfig.from_flat(model=str(folder), decoding=decoding, tool_call_parser=chosen)
    if template is NONE:
        with pytest.raises(ConfigError, match="tool_call_parser='hermes': the checkpoint's chat template shows no"):
            load_answering(config)
        return
    engine = load_answering(config)
    try:
        assert engine.capabilities.tool_calls == format
        sampling = SamplingParams(max_new_tokens=200, seed=1)
        request = Request(
            request_id="a", messages=[Message("user", [Part("text", "hi")])], sampling=sampling, tools=USE
        )
        if format is None:
            with pytest.raises(InvalidRequestError, match=r"tools: .* shows calls in an unknown way"):
                engine.add(request)
            return
        engine.add(request)
        ends = []
        while engine.busy:
            ends += [event for event in engine.step() if isinstance(event, (Failed, Finished))]
    finally:
        engine.close()
    (end,) = ends
    assert isinstance(end, Finished) and end.text is not None, end
    said, (call,) = calls_in(end.text, format, USE.tools)
    assert (said, call.name) == ("", "look") and json.loads(call.arguments)["n"] in (1, 2)
