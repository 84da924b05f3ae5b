"""Small things that every room uses, and that know nothing of caches."""
