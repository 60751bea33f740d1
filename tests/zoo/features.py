"""All features, in the order of the table."""

from __future__ import annotations

from .backward import BACKWARD
from .forward import FORWARD
from .steps import STEPS

FEATURES = {feature.name: feature for feature in (*FORWARD, *STEPS, *BACKWARD)}
