"""Parsing Python in several threads.

CPython 3.11 and 3.12 count how deep a syntax tree is in a place that all threads share. If another thread parses while a tree is
being made, which a garbage collection can lead to, the count is off at the end, and a ``SystemError`` is raised for text that has no
fault. Nothing but that count is harmed, so it is tried again.
"""

from __future__ import annotations

import ast

#: How often a text is parsed before its ``SystemError`` is believed.
_ATTEMPTS = 20


def parse(text: str, filename: str = "<unknown>") -> ast.Module:
    """Return the syntax tree of ``text``, as ``ast.parse`` does.

    Raises:
        SyntaxError: If it is no Python.
    """
    for _ in range(_ATTEMPTS - 1):
        try:
            return ast.parse(text, filename)
        except SystemError:
            continue
    return ast.parse(text, filename)
