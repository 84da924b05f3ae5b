"""Which extra of the package a missing library belongs to."""

from collections.abc import Iterator
from contextlib import contextmanager

_EXTRA_OF = {
    "cuda": "cuda",
    "fastapi": "serve",
    "gguf": "gguf",
    "huggingface_hub": "models",
    "jinja2": "models",
    "llguidance": "serve",
    "matplotlib": "plot",
    "polygraphy": "polygraphy",
    "prometheus_client": "serve",
    "prompt_toolkit": "models",
    "psutil": "serve",
    "pydantic": "serve",
    "ray": "ray",
    "rich": "models",
    "safetensors": "models",
    "threadpoolctl": "models",
    "tokenizers": "models",
    "torch": "torch",
    "typer": "models",
    "uvicorn": "serve",
}


def missing_library(error: ModuleNotFoundError) -> str | None:
    """Return what to do about a library that is not installed."""
    extra = _EXTRA_OF.get((error.name or "").partition(".")[0])
    return None if extra is None else f"{error.name} is not installed. Run: pip install 'trt-kvcache[{extra}]'"


@contextmanager
def naming_the_extra() -> Iterator[None]:
    """Have the import of a library that is not installed name the extra that it belongs to."""
    try:
        yield
    except ModuleNotFoundError as error:
        text = missing_library(error)
        if text is None:
            raise
        raise ModuleNotFoundError(text, name=error.name) from None
