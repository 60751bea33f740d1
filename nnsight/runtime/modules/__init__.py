"""The modules of a model and the operations inside them, as locations: their paths, and the interception of their calls."""
