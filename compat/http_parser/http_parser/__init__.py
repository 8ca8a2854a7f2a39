"""Stand-in for http-parser 0.9.0, whose C extension does not build on Python >= 3.11."""

version_info = (0, 9, 0)
__version__ = "0.9.0"
