"""Pipelines: trace a loss, cut it at its stack, and run it in stages by a schedule."""
