"""What tests and users without weights need: tiny checkpoints of every family, and a torchvision that imports on CPU.

Nothing in polymux outside this package imports it.
"""
