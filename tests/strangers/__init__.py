"""Models in the style of public code: they import Flax, and nothing from this library.

Each file has models of one kind. `cases` has the code that a user adds for training,
and `test_strangers` trains the models.
"""
