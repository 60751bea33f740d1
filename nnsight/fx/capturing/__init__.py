"""Capture: what dynamo makes of a model, with the locations of its modules marked in the graph."""
