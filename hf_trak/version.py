"""The version of the library, which stores and indexes record."""

__version__ = "0.1.0"
