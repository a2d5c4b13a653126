"""Runs of several processes, and what ends them."""
