"""The Trainer: its step, its loop, its evaluation."""
