"""Benchmarks behind the claims: each runs by name and prints its own table."""
