"""Running TensorRT engines, with full TensorRT and with TensorRT for RTX. Only this package imports TensorRT."""
