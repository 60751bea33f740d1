"""Process-wide options.

``CONFIG.APP`` holds the switches of the local library. They are read where they act, so a change takes effect
with the next trace.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class AppConfig:
    """Switches of the local library.

    Attributes:
        DEBUG: Show this package's own frames in tracebacks.
        CROSS_INVOKER: Let invokes see each other's variables. When off, each works on its own copy of the variables
            around it.
        PYMOUNT: Offer ``.save()`` as a method of built-in containers and numbers in helper functions outside of blocks. When
            off, use :func:`nnsight.save` there; inside a block, and on tensors, the method always works.
    """

    DEBUG: bool = False
    CROSS_INVOKER: bool = True
    PYMOUNT: bool = True


@dataclass
class Config:
    """All options, by section."""

    APP: AppConfig = field(default_factory=AppConfig)


CONFIG = Config()
