"""The Trainer: the compiled step, the loop of a fit, and evaluation."""
