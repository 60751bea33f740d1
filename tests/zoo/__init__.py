"""A zoo of tiny models, in which every feature is compared with plain torch hooks and autograd.

``python -m tests.zoo`` runs cells (model, feature, mode) and prints one line for each.

- Models: :mod:`.models`, :mod:`.encoders` and :mod:`.plain`; a :mod:`.specimen` says what is known of one.
- Features: :mod:`.forward`, :mod:`.steps` and :mod:`.backward`, each as a trace and as the same computation by hand.
- :mod:`.forms` has the forms of a program, which are modes like others.
- :mod:`.refusals` lists what is refused on purpose; :mod:`.runner` runs cells; :mod:`.table` writes the table in docs/compile.md.
"""
