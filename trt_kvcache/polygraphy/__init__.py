"""Comparisons of two paths through Polygraphy."""
