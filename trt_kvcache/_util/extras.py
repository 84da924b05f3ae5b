"""Installed and missing libraries, and the extras of this package that install them."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

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
    """Return an error text with the extra that installs a library; None if it belongs to no extra."""
    extra = _EXTRA_OF.get((error.name or "").partition(".")[0])
    return None if extra is None else f"{error.name} is not installed. Run: pip install 'trt-kvcache[{extra}]'"


def installed_versions(distributions: Iterable[str]) -> dict[str, str]:
    """Return the versions of those distributions that are installed."""
    from importlib.metadata import PackageNotFoundError, version  # takes longer to import than the rest of `import trt_kvcache`

    found = {}
    for name in distributions:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


@contextmanager
def naming_the_extra() -> Iterator[None]:
    """Make a failed import of a library name the extra that installs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        text = missing_library(error)
        if text is None:
            raise
        raise ModuleNotFoundError(text, name=error.name) from None
