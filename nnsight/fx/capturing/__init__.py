"""Capturing: dynamo turns a call of a model into a graph, in which taps mark the locations of its modules."""
