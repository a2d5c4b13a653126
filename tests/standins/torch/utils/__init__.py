"""Of PyTorch 2: where the loader is."""
