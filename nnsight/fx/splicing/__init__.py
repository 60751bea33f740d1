"""Splicing: a program is written into a copy of a captured graph, and passes simplify the result."""
