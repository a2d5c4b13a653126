"""A first look: a byte-level GPT trained on 8 simulated devices, restored on 4.

``demo/train.py`` is the script to read.
"""
