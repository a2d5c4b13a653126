"""Measurements behind the claims: each is run by name and prints its own table."""
