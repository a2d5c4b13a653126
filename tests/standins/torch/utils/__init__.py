"""Part of PyTorch 2: the package of the loader."""
