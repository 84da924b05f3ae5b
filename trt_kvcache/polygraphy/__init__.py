"""Polygraphy runners that keep a KV cache, and comparisons of several ways to run one model."""
