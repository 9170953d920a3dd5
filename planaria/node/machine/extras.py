"""Libraries that planaria is installed without, and how to get them."""

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
"""By the name that is imported, the optional dependencies in pyproject.toml that bring it."""


def check(extra: str) -> None:
    """Raises ModuleNotFoundError when something is missing that only this extra brings."""
    for library, brings in EXTRAS.items():
        if brings == extra and find_spec(library) is None:
            raise ModuleNotFoundError(f"No module named {library!r}", name=library)


def remedy(error: ModuleNotFoundError) -> str:
    """A sentence that says what is missing and how to install it. Raises `error` itself if none of
    the extras would bring it."""
    library = (error.name or "").partition(".")[0]
    if library not in EXTRAS:
        raise error
    return f"{library} is not installed: pip install 'planaria[{EXTRAS[library]}]'"
