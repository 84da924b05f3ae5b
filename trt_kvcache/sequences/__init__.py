"""Keeping the contents of slots outside their slots: sequence handles with swapping, the prompt cache, snapshots."""
