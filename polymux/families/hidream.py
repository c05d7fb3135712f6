"""HiDream-I1."""

from polymux.families.base import Family

HIDREAM_I1 = Family(
    name="hidream-i1",
    pipelines=("HiDreamImagePipeline",),
    modality="image",
    tasks=("text-to-image",),
    merge=frozenset({"encoder", "decoder"}),
    warmup=(("max_sequence_length", 64),),  # some text encoders take 77 tokens
    unmerged_because="the routing of its experts sees the whole batch",
    blocks=("double_stream_blocks", "single_stream_blocks"),
)

FAMILIES = (HIDREAM_I1,)
