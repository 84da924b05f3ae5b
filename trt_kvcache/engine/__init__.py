"""What a session needs to know about an engine: the protocol, the names of the tensors, bindings, attention variants."""
