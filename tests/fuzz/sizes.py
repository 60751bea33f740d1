"""Sizes that all models of the fuzzer share."""

#: Features of hidden states: ``[batch, length, WIDTH]``.
WIDTH = 4
#: Number of different token ids.
VOCABULARY = 11
