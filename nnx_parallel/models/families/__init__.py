"""Families of published language models: one file has all that is peculiar to one.

A file maps settings of ``config.json`` to fields of `GPTConfig` and back, names arrays
in files, and lists presets: a `Family`, which `models.gpt_config` lists. Read
`weights.family` first, then `llama`, on which most others build.
"""
