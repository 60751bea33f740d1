"""Blocks whose steps can run as programs: the proof that they can, their recording, and the change between Python and program."""
