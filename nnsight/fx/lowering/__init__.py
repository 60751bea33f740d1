"""Lowering: a spliced graph becomes a function, with regions that are lowered once and backward passes that are lowered late."""
