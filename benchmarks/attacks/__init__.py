"""Attacks on the server: each module has ``measure``, which ``benchmarks/server_attacks.py`` calls."""
