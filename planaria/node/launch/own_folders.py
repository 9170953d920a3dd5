"""Folders that a run file names, on a node: by its owner's options, else below its own folder.

The run file comes from a registry, which may be untrusted. So it can name only folders below the
node's own, and the node reads and writes no others for it.
"""

from __future__ import annotations

import os
from pathlib import Path

from planaria.node.launch.errors import NodeError
from planaria.node.launch.resolve import run_id
from planaria.node.run_file import DataSection, RunFile


def own_folder(out: Path | None, run: RunFile) -> Path:
    """The node's folder for that run; `out`: value of --out."""
    return (out or Path("out")) / run_id(run)


def below(folder: Path, key: str, name: str, option: str) -> Path:
    """The folder that a key of the run file calls `name`. Raises NodeError unless it is below
    `folder`, symbolic links resolved; `option`: overrides it, for the message."""
    own = folder.resolve()
    found = Path(os.path.realpath(own / name))  # unlike `resolve`, also of cyclic links
    if own not in found.parents:
        raise NodeError(
            f"{key} = {name!r}: that folder is not below this node's own, {folder}, so a registry "
            f"may not name it: {option} DIR says where it is on this machine"
        )
    return found


def data_below(folder: Path, data: DataSection) -> DataSection:
    """The data section with paths below the folder. Raises NodeError."""

    def there(name: str) -> str:
        return str(below(folder, "data.path", name, "--data"))

    each = tuple(one.model_copy(update={"path": there(one.path)}) for one in data.corpora)
    path = data.path if each else there(data.path)
    return data.model_copy(update={"path": path, "corpora": each})


def checkpoint_dir(run: RunFile, folder: Path, given: Path | None) -> Path | None:
    """The checkpoint folder, or `given`; None: the policy writes none. Raises NodeError."""
    recovery = run.recovery
    if run.policy.checkpoints:
        named = "recovery.checkpoint.dir", recovery.checkpoint.dir, "--checkpoint-dir"
        return given or below(folder, *named)
    if given is not None:
        raise NodeError(
            f"--checkpoint-dir {given}: with recovery.policy = {recovery.policy} there are no "
            "checkpoints; leave it out"
        )
    return None


def said_here(run: RunFile) -> list[str]:
    """Node options for this machine's folders in the run file, for a node whose owner wrote that
    file."""
    said = [part for name in run.data.names for part in ("--data", str(Path(name).absolute()))]
    if run.model.origin is not None and Path(run.model.origin).is_dir():
        said += ["--model", run.model.origin]
    if run.policy.checkpoints:
        said += ["--checkpoint-dir", str(Path(run.recovery.checkpoint.dir).absolute())]
    return said
