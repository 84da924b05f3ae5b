"""Running TensorRT engines, full TensorRT and TensorRT for RTX alike."""
