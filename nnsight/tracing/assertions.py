"""Assertions in blocks of test modules.

pytest rewrites the ``assert`` statements of the modules that it collects, so that a failure shows the compared values. A block is compiled
from the original text, so its assertions are rewritten here, by pytest's own function.
"""

from __future__ import annotations

import ast
import sys
from typing import Any


def are_rewritten(module_globals: dict[str, Any]) -> bool:
    """Whether pytest has rewritten the assertions of the module with these globals."""
    return "@pytest_ar" in module_globals


def rewritten(body: list[ast.stmt]) -> list[ast.stmt]:
    """Return ``body`` with its assertions rewritten by pytest."""
    rewrite = getattr(sys.modules.get("_pytest.assertion.rewrite"), "rewrite_asserts", None)
    if rewrite is None or not any(isinstance(part, ast.Assert) for statement in body for part in ast.walk(statement)):
        return body
    module = ast.Module(body=body, type_ignores=[])
    rewrite(module, b"")
    return module.body
