"""Engines as a session sees them: the protocol, the names of the tensors, bindings, attention variants."""
