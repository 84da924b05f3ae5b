"""Custom operations that run between the segments of a TensorRT engine, and the stages of such an engine."""
