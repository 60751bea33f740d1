"""Replay: a block whose effects follow from what it reads is not run again; its effects are computed from what it reads now."""
