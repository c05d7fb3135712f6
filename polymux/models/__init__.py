"""Networks of published checkpoints that the libraries do not have, or not for many sentences at once, as classes of
transformers' kind.

Which of them there are, by the names that checkpoints give in their config.json. A class is imported when it is asked
for. Knows neither requests nor engines.
"""

from __future__ import annotations

from importlib import import_module

_OWN = {
    "CsmForConditionalGeneration": "polymux.models.csm.model",
    "Qwen3TTSForConditionalGeneration": "polymux.models.qwen3_tts.model",
    "Qwen3TTSTokenizerV2Model": "polymux.models.qwen3_tts.codec",
}


def own_class(name: str) -> type | None:
    """The class that a checkpoint means by `name`; None: it is none of ours."""
    if name not in _OWN:
        return None
    found: type = getattr(import_module(_OWN[name]), name)
    return found
