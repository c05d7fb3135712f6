"""Where weights live: on the device, in host memory, or in a file that every process on the host maps.

Importing this package imports no torch, so that the command line can look after the runtime cache without it; the
modules that move tensors are imported by name.
"""
