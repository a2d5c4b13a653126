"""Stand-ins for libraries that the site's recipes use and the tests do not install.

Each has the interface of the real library. The recipes were also tried by hand with the
real libraries.
"""
