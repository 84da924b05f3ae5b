"""The two flavours of TensorRT: full TensorRT, and TensorRT for RTX."""

#: Values of ``flavour``. ``"auto"`` comes first; the others are the names of the Python modules, in the order of preference.
FLAVOURS = ("auto", "tensorrt", "tensorrt_rtx")
