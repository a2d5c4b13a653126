"""Tests with several processes, and the faults that end them."""
