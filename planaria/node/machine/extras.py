"""Optional libraries, and how to install them."""

from __future__ import annotations

from importlib.util import find_spec

EXTRAS = {
    "aiohttp": "data",
    "datasets": "data",
    "distributed": "data",
    "matplotlib": "plots",
    "mlflow": "mlflow",
    "pyarrow": "data",
    "tensorboardX": "tensorboard",
    "wandb": "wandb",
}
"""Optional dependencies in pyproject.toml, by the names of the modules that they install."""


def require_extra(extra: str) -> None:
    """Checks that all libraries of this extra are installed. Raises ModuleNotFoundError."""
    for library, brings in EXTRAS.items():
        if brings == extra and find_spec(library) is None:
            raise ModuleNotFoundError(f"No module named {library!r}", name=library)


def remedy(error: ModuleNotFoundError) -> str:
    """Message with the missing library and how to install it. Raises `error` itself if no extra has
    the library."""
    library = (error.name or "").partition(".")[0]
    if library not in EXTRAS:
        raise error
    return f"{library} is not installed: pip install 'planaria[{EXTRAS[library]}]'"
