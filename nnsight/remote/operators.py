"""The operators that programs may use: a fixed table of names."""

from __future__ import annotations

import torch

#: Operator by name.
OPERATORS: dict[str, torch._ops.OpOverload] = {}

#: Hash of the names and schemas in :data:`OPERATORS`; client and server must agree on it.
OPERATORS_HASH = ""
