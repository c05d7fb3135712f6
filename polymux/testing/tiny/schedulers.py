"""Schedulers with the values of the published checkpoints."""

from __future__ import annotations

from typing import Any

import diffusers as D


def flow_match(shift: float = 3.0, dynamic: bool = False, **kw: Any) -> D.FlowMatchEulerDiscreteScheduler:
    return D.FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=shift, use_dynamic_shifting=dynamic, **kw)


def qwen_image_scheduler() -> D.FlowMatchEulerDiscreteScheduler:
    return flow_match(
        1.0,
        True,
        base_image_seq_len=256,
        base_shift=0.5,
        max_image_seq_len=8192,
        max_shift=0.9,
        shift_terminal=0.02,
        time_shift_type="exponential",
    )


def wan_scheduler(flow_shift: float = 3.0) -> D.UniPCMultistepScheduler:
    return D.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=flow_shift
    )


def flux_scheduler() -> D.FlowMatchEulerDiscreteScheduler:
    return flow_match(3.0, True, base_shift=0.5, max_shift=1.15)


def ltx_scheduler() -> D.FlowMatchEulerDiscreteScheduler:
    return flow_match(
        1.0,
        True,
        base_shift=0.95,
        max_shift=2.05,
        base_image_seq_len=1024,
        max_image_seq_len=4096,
        shift_terminal=0.1,
    )
