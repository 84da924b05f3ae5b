"""``trt-kvcache doctor``: checks of a GPU, its driver and TensorRT, each in a child process with a time limit.

``python -m trt_kvcache.doctor`` runs it without the libraries of the command line.
"""
