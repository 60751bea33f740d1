"""Blocks whose steps can run as programs: which they are, their recording, and the change from one to the other."""
