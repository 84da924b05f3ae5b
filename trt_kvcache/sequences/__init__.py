"""Copies of the contents of slots: for swapping, for prefix caching, and for snapshots."""
