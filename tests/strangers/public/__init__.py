"""Models of public repositories, in the structure and idioms of their authors.

Each is a few lines in our words: the sizes are tiny, and how it names its parts, keeps
state, draws numbers and returns its loss is as in the file that its `Public` names.
"""
