"""Steering: from contrast prompts to a vector, from a vector to a steered model.

>>> from nnsight import steering
>>> vector = steering.contrast(model, ["I love it.", ...], ["I hate it.", ...])
>>> vector.save("mood.safetensors")
>>> steered = vector.apply(model, scale=2.0, layers=vector.best_layer)

``steered`` is an edited model: call it, trace it, generate with it, compile it, bake it.
"""

from .directions import contrast
from .sweeping import Sweep, sweep
from .vector import SteeringVector

__all__ = ["SteeringVector", "Sweep", "contrast", "sweep"]
