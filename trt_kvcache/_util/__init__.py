"""Helpers that every package uses and that know nothing of caches: checks, files, the life of objects."""
