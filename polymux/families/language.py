"""Language models: text in, text out. Any causal one of transformers, those that are named here by proof."""

from __future__ import annotations

from typing import Any

from jinja2 import TemplateError

from polymux.errors import InvalidRequestError
from polymux.families.chat import (
    ChatAdapter,
    ChatCall,
    ChatFamily,
    Hooks,
    Question,
    check_known,
    drawing,
    ends_of,
    plain_messages,
    room_for,
)
from polymux.families.generate import Parts
from polymux.families.tool_templates import call_format, offered, takes_tools
from polymux.request import Bounds, SamplingParams
from polymux.tools import CallFormat

ANY = "ForCausalLM"  # how the names of such classes end


class LanguageAdapter(ChatAdapter):
    def tokenizer(self, parts: Parts) -> Any:
        return parts.processor

    def context(self, parts: Parts) -> int | None:
        return getattr(parts.model.config.get_text_config(), "max_position_embeddings", None)  # some know no limit

    def longest(self, parts: Parts, limit_s: float) -> int | None:
        return self.context(parts)

    def knows(self, parts: Parts, name: str) -> bool:
        return name in (parts.processor.chat_template or "")

    def takes_tools(self, parts: Parts) -> bool:
        template = parts.processor.chat_template
        return isinstance(template, str) and takes_tools(template)

    def tool_calls(self, parts: Parts) -> CallFormat | None:
        template = parts.processor.chat_template
        return call_format(template) if isinstance(template, str) else None

    def ask(self, parts: Parts, question: Question) -> ChatCall:
        inputs = self._inputs(parts.processor, question)
        ids = inputs["input_ids"]
        check_known(parts.processor, ids, parts.model)
        settings = parts.model.generation_config
        ends = ends_of(settings.eos_token_id, parts.processor.eos_token_id)
        steps = room_for(ids.shape[1], self.context(parts), question.params, settings.max_new_tokens)
        arguments = {name: inputs[name].to(parts.model.device) for name in ("input_ids", "attention_mask")}
        arguments |= {"max_new_tokens": steps, "eos_token_id": sorted(ends) or None}
        return ChatCall(
            arguments=arguments | drawing(question.params), prompt_tokens=ids.shape[1], steps=steps, ends=ends
        )

    def answer(self, parts: Parts, call: ChatCall, hooks: Hooks) -> Any:
        parts.model.generate(**call.arguments, **hooks.named())

    def _inputs(self, tokenizer: Any, question: Question) -> Any:
        """A bare prompt is what a user says, where there is a template for that; else it is the beginning of a text."""
        if tokenizer.chat_template is None:
            if not question.bare:
                what = "the checkpoint has no template for conversations; it goes on with a prompt"
                raise InvalidRequestError(f"messages: {what}", param="messages")
            return tokenizer(question.messages[0].parts[-1].text, return_tensors="pt")
        try:
            return tokenizer.apply_chat_template(
                plain_messages(question.messages),
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
                return_tensors="pt",
                tools=offered(question.tools),
                **question.params.extra_args,
            )
        except TemplateError as error:
            raise InvalidRequestError(
                f"messages: the model's template refuses them: {error}", param="messages"
            ) from None


LANGUAGE = ChatFamily(
    name="language",
    models=("Qwen3ForCausalLM",),
    tasks=("text-generation",),
    adapter=LanguageAdapter(),
    processor="AutoTokenizer",
    steps=("model.forward", "transformer.forward", "gpt_neox.forward"),
    extra=("enable_thinking",),  # of their templates
    bounds={"enable_thinking": Bounds(kind="flag")},
    decoders_merged=("model.forward",),
    heads_merged=("lm_head.forward",),
    paged=("Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM", "MistralForCausalLM"),
    unmerged_because="with `--decoding generate`, each answer has a loop and a cache of its own",
    warmup=SamplingParams(seed=0, max_new_tokens=2),
)

FAMILIES = (LANGUAGE,)
