"""Folders that a run file names, on a node: by its owner's options, else below its own folder.

The run file comes from a registry, which may be untrusted. So it can name only folders below the
node's own, and the node reads and writes no others for it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from planaria.node.launch.errors import NodeError
from planaria.node.launch.resolve import run_id
from planaria.node.run_file import DataSection, RunFile


def own_folder(out: Path | None, run: RunFile) -> Path:
    """The node's folder for a run; `out`: value of --out."""
    return (out or Path("out")) / run_id(run)


def folder_below(folder: Path, key: str, name: str, option: str) -> Path:
    """The folder that a key of the run file calls `name`. Raises NodeError unless it is below
    `folder`, symbolic links resolved; `option`: overrides it, for the message."""
    parent = folder.resolve()
    path = Path(os.path.realpath(parent / name))  # unlike `resolve`, also of cyclic links
    if parent not in path.parents:
        raise NodeError(
            f"{key} = {name!r}: that folder is not below this node's own, {folder}, so a registry "
            f"may not name it: {option} DIR says where it is on this machine"
        )
    return path


def data_below(folder: Path, data: DataSection) -> DataSection:
    """The run's data section with paths below a node's folder. Raises NodeError."""
    return data.moved(lambda name: folder_below(folder, "data.path", name, "--data"))


def checkpoint_dir(run: RunFile, folder: Path, override: Path | None) -> Path | None:
    """The checkpoint folder, or `override`; None: the policy writes none. Raises NodeError."""
    recovery = run.recovery
    if run.policy.checkpoints:
        key = "recovery.checkpoint.dir", recovery.checkpoint.dir, "--checkpoint-dir"
        return override or folder_below(folder, *key)
    if override is not None:
        raise NodeError(
            f"--checkpoint-dir {override}: with recovery.policy = {recovery.policy} there are no "
            "checkpoints; leave it out"
        )
    return None


def folder_options(
    run: RunFile, data: Iterable[str] = (), checkpoints: Path | None = None
) -> list[str]:
    """Node options that name the folders in the run file, for a node whose owner wrote that file.
    `data`, `checkpoints`: where they are, if elsewhere."""
    names = data or [str(Path(name).absolute()) for name in run.data.names]
    options = [part for name in names for part in ("--data", name)]
    if run.model.origin is not None and Path(run.model.origin).is_dir():
        options += ["--model", run.model.origin]
    if run.policy.checkpoints:
        folder = checkpoints or Path(run.recovery.checkpoint.dir)
        options += ["--checkpoint-dir", str(folder.absolute())]
    return options
