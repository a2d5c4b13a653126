"""Benchmarks behind the claims: each runs by name and prints a table."""
