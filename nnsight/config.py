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
        PYMOUNT: Offer ``.save()`` as a method of every object while a block runs. When off, use
            :func:`nnsight.save`; tensors keep the method.
    """

    DEBUG: bool = False
    PYMOUNT: bool = True


@dataclass
class Config:
    """All options, by section."""

    APP: AppConfig = field(default_factory=AppConfig)


CONFIG = Config()
