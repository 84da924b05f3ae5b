"""Several engines as one server, with Ray Serve. Importing this package imports Ray."""

from trt_kvcache._util.extras import naming_the_extra

with naming_the_extra():
    import ray.serve as _serve  # noqa: F401

from trt_kvcache.server.ray_serve.application import Arguments, application, make_application

__all__ = ["Arguments", "application", "make_application"]
