"""What the site's recipes use of libraries that the tests do not install.

Each has the interface of the library itself, with which the recipes are tried by hand.
"""
