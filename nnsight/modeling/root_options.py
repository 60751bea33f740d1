"""Checks of the options of a root envoy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..envoy.envoy import Envoy
from ..envoy.renaming import check_names

#: The value of ``compile=`` that stands for the options ``{"background": True}``.
BACKGROUND = "background"


def compile_options(compile: bool | str | dict[str, Any]) -> dict[str, Any] | None:
    """Return the options of :meth:`NNsight.compile` that ``compile=`` stands for; ``None`` for eager."""
    if isinstance(compile, dict):
        return dict(compile)
    return {"background": True} if compile == BACKGROUND else {} if compile else None


def check_options(compile: Any, rename: Any, envoys: Any) -> None:
    """Raise ``TypeError`` if an option has a wrong type."""
    if not isinstance(compile, (bool, dict)) and compile != BACKGROUND:
        raise TypeError(
            f"compile= is True, False, {BACKGROUND!r} or a dict of the options of torch.compile, not {compile!r}."
        )
    if rename is not None:
        check_names(rename)
    for kind in envoys.values() if isinstance(envoys, Mapping) else () if envoys is None else [envoys]:
        if not (isinstance(kind, type) and issubclass(kind, Envoy)):
            raise TypeError(f"envoys= is a class of envoys, or a dict from classes or paths of modules to such classes; not {kind!r}.")
