""" the protocol:Engines as a session sees them: the protocol: the protocol, the names of the tensors, bindings, attention variants."""
