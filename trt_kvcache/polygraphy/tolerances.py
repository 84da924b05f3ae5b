"""Our tolerance of each dtype, by the name of the dtype: what ``polygraphy run --compare-func-script THIS_FILE:float16`` takes."""

from trt_kvcache.polygraphy.compare_func import SessionCompareFunc
from trt_kvcache.polygraphy.path_comparison import TOLERANCES

globals().update({dtype: SessionCompareFunc(dtype=dtype) for dtype in TOLERANCES})
