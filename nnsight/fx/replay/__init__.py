"""Replay: computes the effects of a block from the objects that it reads, without running its Python."""
