"""Host and GPU memory: allocation, tensors over it, copies, streams and DLPack."""
