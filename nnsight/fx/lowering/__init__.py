"""Lowering: turns a spliced graph into a function. Equal regions are lowered once, and backward passes on first use."""
