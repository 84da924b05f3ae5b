"""Helpers for all packages, independent of caches: checks of arguments, files that are written atomically, objects that can be closed."""
