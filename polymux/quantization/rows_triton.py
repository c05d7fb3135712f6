"""The Triton kernel of `rows`: one program quantizes one row. Imported on machines with a GPU only."""

from __future__ import annotations

import triton
import triton.language as tl


# Triton compiles the source: annotations other than its own are errors to it.
@triton.jit  # type: ignore[untyped-decorator]
def quantize_row(x, codes, scales, columns, largest, smallest, whole: tl.constexpr, width: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, width)
    inside = at < columns
    values = tl.load(x + row * columns + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(values)), smallest) / largest
    code = tl.clamp(values / scale, -largest, largest)
    if whole:
        code = tl.floor(code + 0.5)
    tl.store(codes + row * columns + at, code.to(codes.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale)
