"""Code that runs inside the worker of an engine: the steps of its model, the rows of each request in a step, and the stops for blocks."""
