"""Comparison functions with our tolerances, by dtype: ``polygraphy run --compare-func-script THIS_FILE:float16``."""

from trt_kvcache.polygraphy.compare_func import SessionCompareFunc
from trt_kvcache.polygraphy.path_comparison import TOLERANCES

globals().update({dtype: SessionCompareFunc(dtype=dtype) for dtype in TOLERANCES})
