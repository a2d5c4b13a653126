"""Stand-ins for libraries that the site's recipes use and the tests do not install.

Each has the interface of the library itself, with which the recipes are tried by hand.
"""
