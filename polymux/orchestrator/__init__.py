"""The API process' side of the stages: who runs what, request state, stage processes. Imports no torch."""
