"""planaria trains large language models on machines that come and go.

`run = planaria.load("run.toml")` reads a run file, `result = planaria.up(run)` trains it with a
swarm on this machine, as the command `planaria up` does, and `result` has the losses, and the model
to export. They are loaded when they are first asked for.

Its packages are `recovery`, `bootstrap` and `node`, of which each imports only those before it;
`corpus` is the prose of the first run. CONTRIBUTING.md has the map.
"""

TYPE_CHECKING = False  # typing's, which would have to be loaded
if TYPE_CHECKING:
    from planaria.node.local.from_python import Result, RunFileError, SwarmError, load, up

    __version__: str

__all__ = ["Result", "RunFileError", "SwarmError", "load", "up"]


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("planaria")
        except PackageNotFoundError:
            return "unknown"  # of a checkout that isn't installed
    if name not in __all__:
        raise AttributeError(f"planaria has no {name!r}; it has {', '.join(__all__)}")
    from planaria.node.local import from_python

    return getattr(from_python, name)
