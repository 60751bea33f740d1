"""nnsight: an intervention compiler for PyTorch models.

Inside ``with model.trace(...)`` you write ordinary Python against a model's internals. This code runs together with the model: eagerly,
or lowered into the graph that ``torch.compile`` captured from the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .config import CONFIG
from .late_binding import provide
from .lazy import load
from .tracing import WithBlockNotFoundError, save

if TYPE_CHECKING:
    from .envoy.envoy import Envoy
    from .fx.show.debug import debug_dir
    from .modeling.base import NNsight
    from .modeling.diffusion import DiffusionModel
    from .modeling.language import LanguageModel, demo_model
    from .modeling.transformers import TransformersModel
    from .modeling.vlm import VisionLanguageModel
    from .ndif import compare, is_model_running, login, ndif_status, register, status, whoami
    from .program.program import Program
    from .runtime.errors import NNsightDeprecationWarning, UncompiledWarning
    from .util import Object

__version__ = "0.9.0.dev0"

provide(
    backend_for="nnsight.remote.client.remote_backend",
    call_edited="nnsight.fx.inlining",
    baked_edits="nnsight.program.edits",
    CompiledEdits="nnsight.program.edits",
    component_of="nnsight.modeling.component",
    program_of="nnsight.program.traces",
    program_trace="nnsight.program.traces",
    root_class="nnsight.modeling.base",
    model_key_of="nnsight.remote.protocol",
    ModelKey="nnsight.remote.protocol",
    ProgramBlock="nnsight.program.run.program_block",
)

#: Public names that are imported on first use, and the module of each.
_LAZY = {
    "DiffusionModel": ".modeling.diffusion",
    "Envoy": ".envoy",
    "LanguageModel": ".modeling.language",
    "NNsight": ".modeling.base",
    "NNsightDeprecationWarning": ".runtime.errors",
    "Object": ".util",
    "Program": ".program.program",
    "TransformersModel": ".modeling.transformers",
    "UncompiledWarning": ".runtime.errors",
    "VisionLanguageModel": ".modeling.vlm",
    "compare": ".ndif",
    "debug_dir": ".fx.show.debug",
    "demo_model": ".modeling.language",
    "is_model_running": ".ndif",
    "login": ".ndif",
    "ndif_status": ".ndif",
    "register": ".ndif",
    "status": ".ndif",
    "whoami": ".ndif",
}

__all__ = [
    "CONFIG",
    "DiffusionModel",
    "Envoy",
    "LanguageModel",
    "NNsight",
    "NNsightDeprecationWarning",
    "Object",
    "Program",
    "TransformersModel",
    "UncompiledWarning",
    "VisionLanguageModel",
    "WithBlockNotFoundError",
    "compare",
    "debug_dir",
    "demo_model",
    "is_model_running",
    "login",
    "ndif_status",
    "register",
    "save",
    "status",
    "whoami",
]


#: Submodules that are imported on first use as attributes, as in ``nnsight.fx``.
_MODULES = {"cli", "envoy", "fx", "intervention", "modeling", "ndif", "program", "remote", "runtime", "schema", "util"}


#: Functions of releases before 0.5, whose blocks were graphs of proxies, and what to write instead.
_REMOVED = {
    **dict.fromkeys(("bool", "dict", "float", "int", "list", "set", "str", "tuple"), "Python's own, as in `values = [].save()`"),
    "apply": "a plain call, `function(value)`",
    "cond": "`if`",
    "iter": "`for`",
    "local": "plain Python, which runs in this process",
    "log": "`print`",
    "stop": "`tracer.stop()`",
    "trace": "a plain function, which a block can call",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return load(__name__, name, f".{name}")
    if name not in _LAZY:
        instead = f"; releases before 0.5 had it. Use {_REMOVED[name]}." if name in _REMOVED else ""
        raise AttributeError(f"module 'nnsight' has no attribute {name!r}{instead}")
    value = getattr(load(__name__, name, _LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, *_MODULES})
