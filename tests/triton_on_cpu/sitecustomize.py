"""Lets vLLM's model runner V2 run on CPUs. Python runs this first of all where the folder is on its search path.

V2 prepares its batches with Triton kernels, and vLLM looks for a backend of Triton for CPUs, which the released Triton does not have. So
Triton interprets its kernels, in numpy, and something that is never active takes the place of the backend that vLLM looks for.
"""

import os
import types

os.environ["TRITON_INTERPRET"] = "1"  # read as Triton is imported

from triton.backends import backends
from triton.runtime import interpreter

backends["cpu"] = types.SimpleNamespace(driver=types.SimpleNamespace(is_active=lambda: False))


class _Index(int):
    """What a loop of a kernel counts with. Triton's is a tensor, which has ``to``; that of its interpreter is an ``int``, which has not."""

    def to(self, dtype: object) -> "_Index":
        return self


_patch = interpreter._patch_lang_core


def _patch_and_count(lang, scope):
    _patch(lang, scope)
    count = lang.range
    for name in ("range", "static_range"):
        scope.set_attr(lang, name, lambda *args, **kwargs: map(_Index, count(*args, **kwargs)))


interpreter._patch_lang_core = _patch_and_count
