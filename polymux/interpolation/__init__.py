"""Frames between frames: a network that estimates motion, its weights, and where its frames stand among the others."""
