"""Models in the structure and idioms of public repositories.

Each model is a short rewrite with tiny sizes. It names its parts, keeps state, draws
random numbers and returns its loss as in the file that its `Public` names.
"""
