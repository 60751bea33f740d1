"""A zoo of tiny models, in which every feature is compared with plain torch hooks and autograd.

``python -m tests.zoo`` runs cells (model, feature, mode) and prints one line for each:

:mod:`.models` and :mod:`.plain` have the models, :mod:`.forward`, :mod:`.backward` and :mod:`.steps` the features, each as a trace and
as the same thing done by hand, :mod:`.refusals` what is refused on purpose, :mod:`.runner` runs cells, :mod:`.table` writes
the table in docs/compile.md.
"""
