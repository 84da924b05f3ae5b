"""Bytes and views of them: host memory, GPU memory, tensors, copies."""
