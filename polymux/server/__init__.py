"""HTTP in, HTTP out; knows no tensors and imports no torch."""
