"""The cases of the parity tests: models, strategies, and how one run is measured."""
