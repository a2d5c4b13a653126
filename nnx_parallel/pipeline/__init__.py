"""Runs a schedule: traces the loss, cuts it at its stack, and runs it in stages."""
