"""Splicing: a program becomes part of a captured graph, and passes simplify the result."""
