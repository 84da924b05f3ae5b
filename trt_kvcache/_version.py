"""The version, alone in a module so that building reads it without importing anything."""

__version__ = "0.1.0"
