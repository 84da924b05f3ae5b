"""What a session needs to know of an engine: its protocol, the names of its tensors, bindings, attention variants."""
