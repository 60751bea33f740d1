"""Differential fuzzing: random modules and random blocks, run by plain torch hooks, eagerly and compiled.

* :mod:`~tests.fuzz.nets` has the modules, and builds a model from a description;
* :mod:`~tests.fuzz.stock` has modules and decoders of torch and transformers;
* :mod:`~tests.fuzz.occurrences` finds out where a block can do something in a model;
* :mod:`~tests.fuzz.statements` has what it can do there;
* :mod:`~tests.fuzz.blocks` draws blocks for a model, as statements at occurrences of the model;
* :mod:`~tests.fuzz.source` writes a block as the text of a program with real ``with model.trace(...)`` statements;
* :mod:`~tests.fuzz.reference` runs the same statements inside plain torch hooks;
* :mod:`~tests.fuzz.world` has what a block can reach, and says what has to agree after a run;
* :mod:`~tests.fuzz.runner` runs one case in all ways, and compares;
* :mod:`~tests.fuzz.invokes` draws traces of several invokes with barriers, for :mod:`~tests.fuzz.test_invokes`.

``python -m tests.fuzz --help`` runs many cases.
"""
