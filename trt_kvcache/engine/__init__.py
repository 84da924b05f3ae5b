"""What an engine is to a session: its protocol, the names of its tensors, bindings."""
