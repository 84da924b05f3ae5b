"""Building TensorRT engines from a Hugging Face checkpoint."""
