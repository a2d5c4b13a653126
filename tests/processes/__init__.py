"""Runs of several processes, and the faults that end them."""
