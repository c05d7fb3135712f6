"""Janus: reads text and pictures and writes text; or writes the tokens of a picture, with guidance of its own.

Its pictures have one size. With guidance it always draws two samples at once, the second of them without the prompt.
"""

from __future__ import annotations

from typing import Any

from polymux.families.chat import (
    ChatCall,
    Hooks,
    Question,
    check_marks,
    drawing,
    ends_of,
    room_for,
)
from polymux.families.generate import Parts, no_control_tokens
from polymux.families.pictures import (
    Canvas,
    PictureAdapter,
    PictureCall,
    PictureFamily,
    PictureWish,
    check_guidance,
    check_room,
    conversed,
    pixels_of,
)

_TEXT = 1024  # tokens of an answer, unless the checkpoint or the request says otherwise
_LEAST_GUIDANCE = 1.01  # at 1 the model's own loop fails: it draws with guidance only


class JanusAdapter(PictureAdapter):
    def check(self, parts: Parts) -> str | None:
        if parts.model.generation_config.pad_token_id is None:
            return "its generation_config.json has no pad_token_id, which guidance needs"
        return super().check(parts)

    # Pictures.

    def canvas(self, parts: Parts) -> Canvas:
        config = parts.model.config.vq_config
        side = config.num_patches * 2 ** (len(config.channel_multiplier) - 1)
        return Canvas(width=side, height=side)

    def plan(self, parts: Parts, wish: PictureWish) -> PictureCall:
        check_guidance(wish.guidance_scale, _LEAST_GUIDANCE, "the model draws with guidance")
        no_control_tokens(parts.processor.tokenizer, wish.prompt)
        said = [{"role": "user", "content": [{"type": "text", "text": wish.prompt}]}]
        text = wish.prompt
        if self.answers(parts):
            text = parts.processor.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
        inputs = parts.processor(text=text, generation_mode="image", return_tensors="pt").to(parts.model.device)
        side = parts.model.config.vq_config.num_patches
        count = inputs["input_ids"].shape[1]
        check_room(count, side * side, self.context(parts))
        arguments = {name: inputs[name] for name in ("input_ids", "attention_mask")} | wish.drawn
        if wish.guidance_scale is not None:
            arguments["guidance_scale"] = wish.guidance_scale
        return PictureCall(arguments=arguments, steps=side * side, rows=side, columns=side, prompt_tokens=count)

    def draw(self, parts: Parts, call: PictureCall) -> Any:
        # Loading a checkpoint's settings drops what transformers does not know, and this is asked for all the same.
        parts.model.generation_config.generation_kwargs = {"boi_token_id": parts.processor.tokenizer.boi_token_id}
        tokens = parts.model.generate(**call.arguments, generation_mode="image")
        made = parts.model.model.vqmodel.decode(tokens)[0]
        return pixels_of(made, parts.processor.image_processor)

    # Answers.

    def ask(self, parts: Parts, question: Question) -> ChatCall:
        marks = (parts.processor.image_token, parts.processor.image_start_token, parts.processor.image_end_token)
        check_marks(question.messages, marks)
        inputs = conversed(parts, question, generation_mode="text")
        count = inputs["input_ids"].shape[1]
        settings = parts.model.generation_config
        ends = ends_of(settings.eos_token_id, parts.processor.tokenizer.eos_token_id)
        steps = room_for(count, self.context(parts), question.params, settings.max_new_tokens or _TEXT)
        arguments = dict(inputs.to(parts.model.device, parts.model.dtype)) | drawing(question.params)
        arguments |= {"max_new_tokens": steps, "eos_token_id": sorted(ends) or None, "guidance_scale": None}
        return ChatCall(arguments=arguments, prompt_tokens=count, steps=steps, ends=ends)

    def answer(self, parts: Parts, call: ChatCall, hooks: Hooks) -> Any:
        # Past the class's own `generate`, which for text does the same, but passes no logits processors on.
        plain: Any = super(type(parts.model), parts.model)
        plain.generate(**call.arguments, **hooks.named())


JANUS = PictureFamily(
    name="janus",
    models=("JanusForConditionalGeneration",),
    tasks=("text-to-image", "image-text-to-text"),
    adapter=JanusAdapter(),
    processor="JanusProcessor",
    components=(
        "model.language_model", "lm_head", "model.vision_model", "model.aligner", "model.vqmodel",
        "model.generation_embeddings", "model.generation_aligner", "model.generation_head",
    ),
    steps=("model.language_model.forward",),
    decoders=("model.vqmodel",),
    takes=(("image", 16),),
    decoders_merged=("model.language_model.forward",),
    heads_merged=("model.language_model.embed_tokens.forward", "lm_head.forward"),
    unmerged_because="only of answers, where `--merge-decoding` asks for it: a step of a picture is of two samples",
)  # fmt: skip

FAMILIES = (JANUS,)
