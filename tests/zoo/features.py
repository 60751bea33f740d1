"""All features, in the order of the table."""

from __future__ import annotations

from .backward import BACKWARD, gradients, gradients_by_hand
from .forward import FORWARD, edit, edit_by_hand
from .steps import STEPS
from .subject import Feature
from .together import TOGETHER

#: Other number formats: what is read and differentiated in them is as good as the format.
_FORMATS = [
    Feature("bfloat16", edit, edit_by_hand, variant="bfloat16"),
    Feature("bfloat16-gradients", gradients, gradients_by_hand, grad=True, variant="bfloat16"),
]

FEATURES = {feature.name: feature for feature in (*FORWARD, *STEPS, *BACKWARD, *_FORMATS, *TOGETHER)}
