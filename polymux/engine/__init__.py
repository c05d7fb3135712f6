"""Runs one stage of a model: one interface (`base.StageEngine`), its implementations, and the process around them."""
