"""Diffusion pipelines as coroutines of component calls: capture, merge, split, and whose turn it is."""
