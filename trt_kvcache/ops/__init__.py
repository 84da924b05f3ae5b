"""Custom operations that run between the segments of a TensorRT engine, and what an engine in segments consists of."""
