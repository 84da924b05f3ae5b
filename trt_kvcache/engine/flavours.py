"""Which TensorRT: full TensorRT, or TensorRT for RTX."""

#: What ``flavour`` may be.
FLAVOURS = ("auto", "tensorrt", "tensorrt_rtx")
