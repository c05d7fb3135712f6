"""Autoregressive decoding of many sequences as one batch: paged keys and values, a scheduler, a sampler, a runner.

Knows sequences of tokens and the network that goes on with them; no requests, no texts, no processes.
"""
