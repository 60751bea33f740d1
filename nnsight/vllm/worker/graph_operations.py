"""Operations in the graph of a compiled engine that are functions of Python.

An engine calls them at every layer of every step, also where nobody waits for a value. So torch's dispatcher is told of them directly:
what ``torch.library.custom_op`` puts around a function, for gradients and for versions of tensors that change, takes several times as long
as an operation that has nothing to do. Nothing here is differentiated, and what a graph has to know of a change is in the signature.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_library = torch.library.Library("nnsight", "FRAGMENT")


def define(name: str, signature: str, function: Callable[..., None]) -> None:
    """Make ``function`` the operation ``name`` (``"nnsight::..."``) on every device; it returns nothing.

    Args:
        name: Its name.
        signature: As torch writes signatures, such as ``"(Tensor(a!) x) -> ()"``, in which ``!`` says what is written to.
        function: What it does. Compilers, which have shapes only, do nothing in its place.
    """

    def nothing(*_: Any) -> None:
        return None

    short = name.removeprefix("nnsight::")
    _library.define(short + signature)
    _library.impl(short, function, "CompositeExplicitAutograd")
    torch.library.register_fake(name, nothing, lib=_library)
