"""Building TensorRT engines from a checkpoint."""
