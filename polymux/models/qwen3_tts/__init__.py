"""Qwen3-TTS: a talker that writes frames of codes, and the codec that makes sound of them.

The names of parameters are those of the published checkpoints. The decoder layers are transformers' own; around them
stands what makes many requests run as one: places in shared tensors for keys and values, noise that comes as an
argument, and a codec whose memory is an argument too.
"""
