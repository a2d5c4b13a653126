"""Families of published language models; each file has all facts about one family.

A file maps settings of ``config.json`` to fields of `GPTConfig` and back, gives the
names of arrays in files, and lists presets. These make a `Family`, and
`models.gpt_config` lists all families. Read `weights.family` first, then `llama`, on
which most other families build.
"""
