"""Emu3: one vocabulary of texts and pictures. A picture is written row by row, and is what a text may go on with.

Which token may come where in a picture is a grammar, which `generate` holds the model to. With guidance each token
takes two calls of the decoder, of which the second one knows the negative prompt in place of the prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from polymux.errors import InvalidRequestError
from polymux.families.chat import ChatCall, Hooks, Question, check_marks, drawing, ends_of, room_for
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
_AFTER = 3  # tokens that end a picture
_END_OF_ROW = "<|extra_200|>"


def _conversed(parts: Parts, question: Question) -> Any:
    """With pictures that say where their colours stand: of those of three rows, or one, it would be guessed."""
    return conversed(parts, question, images_kwargs={"input_data_format": "channels_last"})


_RATIO, _AREA = "1:1", 720 * 720  # of pictures, where a version of transformers does not keep what a checkpoint says


class Emu3Adapter(PictureAdapter):
    # Pictures.

    def canvas(self, parts: Parts) -> Canvas:
        factor = int(parts.model.model.vqmodel.vision_spatial_factor)
        kept = vars(parts.processor)
        rows, columns = parts.processor.calculate_generate_size(
            kept.get("ratio", _RATIO), kept.get("image_area", _AREA), factor
        )
        return Canvas(width=columns * factor, height=rows * factor, multiple=factor)

    def plan(self, parts: Parts, wish: PictureWish) -> PictureCall:
        processor, device = parts.processor, parts.model.device
        check_guidance(wish.guidance_scale, 1, "1 is no guidance")
        scale = parts.model.generation_config.guidance_scale if wish.guidance_scale is None else wish.guidance_scale
        guided = scale is not None and scale != 1
        if wish.negative_prompt is not None and not guided:
            what = "negative_prompt: has no effect without guidance: guidance_scale must be above 1"
            raise InvalidRequestError(what, param="negative_prompt")
        no_control_tokens(processor.tokenizer, wish.prompt)
        no_control_tokens(processor.tokenizer, wish.negative_prompt or "", "negative_prompt")
        inputs = processor(
            text=wish.prompt,
            return_for_image_generation=True,
            ratio=f"{wish.width}:{wish.height}",
            image_area=wish.width * wish.height,
            return_tensors="pt",
        )
        ((rows, columns),) = inputs["image_sizes"]
        count, tokens = inputs["input_ids"].shape[1], rows * (columns + 1) + _AFTER
        check_room(count, tokens, self.context(parts), "size")
        arguments = {name: inputs[name].to(device) for name in ("input_ids", "attention_mask")} | wish.drawn
        arguments |= {"max_new_tokens": tokens, "guidance_scale": scale}
        arguments["prefix_allowed_tokens_fn"] = self._grammar(parts, count, rows, columns)
        if wish.negative_prompt is not None:
            negative = processor(text=wish.negative_prompt, return_tensors="pt").to(device)
            arguments["negative_prompt_ids"] = negative["input_ids"]
            arguments["negative_prompt_attention_mask"] = negative["attention_mask"]
        return PictureCall(
            arguments=arguments, steps=tokens * (2 if guided else 1), rows=rows, columns=columns, prompt_tokens=count
        )

    def draw(self, parts: Parts, call: PictureCall) -> Any:
        model = parts.model
        tokens = model.generate(**call.arguments)[:, call.prompt_tokens : -_AFTER]
        codes = model.vocabulary_mapping.convert_bpe2img(tokens.view(-1, call.rows, call.columns + 1))
        made = model.model.vqmodel.decode(codes)
        return pixels_of(made.reshape(made.shape[-3:]), parts.processor.image_processor)

    def _grammar(self, parts: Parts, begin: int, rows: int, columns: int) -> Callable[[int, Any], Any]:
        """What may come next, of the tokens so far: rows of visual tokens, each with its end, and what ends them."""
        tokenizer, device = parts.processor.tokenizer, parts.model.device
        visual = parts.model.vocabulary_mapping.image_tokens

        def ids(*tokens: int) -> Any:
            return parts.model.lm_head.weight.new_tensor(tokens, dtype=int).to(device)

        def allowed(batch: int, written: Any) -> Any:
            done = written.shape[0] - begin
            if done < rows * (columns + 1):
                return end_of_row if (done + 1) % (columns + 1) == 0 else any_visual
            return after[min(done - rows * (columns + 1), _AFTER - 1)]

        any_visual, end_of_row = ids(*visual), ids(tokenizer.convert_tokens_to_ids(_END_OF_ROW))
        after = [ids(one) for one in (tokenizer.eof_token_id, tokenizer.eoi_token_id, tokenizer.eos_token_id)]
        return allowed

    # Answers.

    def ask(self, parts: Parts, question: Question) -> ChatCall:
        processor = parts.processor
        marks = (processor.image_token, processor.image_start_token, processor.image_end_token)
        check_marks(question.messages, (*marks, processor.fake_token_around_image))
        inputs = _conversed(parts, question)
        count, settings = inputs["input_ids"].shape[1], parts.model.generation_config
        ends = ends_of(settings.eos_token_id, processor.tokenizer.eos_token_id)
        # What the settings allow is the length of a picture.
        steps = room_for(count, self.context(parts), question.params, _TEXT)
        arguments = dict(inputs.to(parts.model.device, parts.model.dtype)) | drawing(question.params)
        arguments |= {"max_new_tokens": steps, "eos_token_id": sorted(ends) or None, "guidance_scale": None}
        return ChatCall(arguments=arguments, prompt_tokens=count, steps=steps, ends=ends)

    def answer(self, parts: Parts, call: ChatCall, hooks: Hooks) -> Any:
        parts.model.generate(**call.arguments, **hooks.named())


EMU3 = PictureFamily(
    name="emu3",
    models=("Emu3ForConditionalGeneration",),
    tasks=("text-to-image", "image-text-to-text"),
    adapter=Emu3Adapter(),
    processor="Emu3Processor",
    components=("model.text_model", "lm_head", "model.vqmodel"),
    steps=("model.text_model.forward",),
    decoders=("model.vqmodel",),
    takes=(("image", 16),),
    decoders_merged=("model.text_model.forward",),
    heads_merged=("model.text_model.embed_tokens.forward", "lm_head.forward"),
    pictures_merged=True,
    picture_arguments=("negative_prompt", "guidance_scale"),
)

FAMILIES = (EMU3,)
