"""Families of published language models, one module for each family.

A module defines each `Family`: how to convert settings of ``config.json`` to fields of
`GPTConfig` and back, the names of arrays in files, and presets. `models.gpt_config`
lists all families. Read `weights.family` first, and then `llama`, because most other
families are changed copies of `LLAMA`.
"""
