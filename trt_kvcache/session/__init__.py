"""Prefill, decode and generation on one cache and one engine."""
