"""The cases of the proof by parity: models, strategies, and how one run is measured."""
