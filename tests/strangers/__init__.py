"""Models as others write them: they import Flax, and nothing of this library.

Each file has models of one kind in the shapes of public code; `cases` has a user's
additions for training, and `test_strangers` trains them.
"""
