"""Upload of an exported folder to the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from planaria.node.hugging_face.begin_from_model import HUB_NAME
from planaria.node.hugging_face.export import ExportError


def check_push(name: str) -> None:
    """Check the hub's name and login before an export. Raises ExportError."""
    from huggingface_hub import get_token

    named = HUB_NAME.fullmatch(name)
    if named is None or named[2]:
        raise ExportError(f"--push {name}: give the repository as ORG/NAME")
    if get_token() is None:
        raise ExportError(f"--push {name}: log in with `hf auth login`, or set HF_TOKEN")


def upload(folder: Path, name: str, private: bool, say: Callable[[str], object]) -> None:
    """Upload an exported folder to the hub's repository `name`, created `private` or public if it
    is missing. First says what will be uploaded, and its visibility. Raises ExportError."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    hub = HfApi()
    try:
        try:
            hidden, new = bool(hub.repo_info(name).private), False
        except RepositoryNotFoundError:
            hidden, new = private, True
        if private and not hidden:
            raise ExportError(
                f"--private: {name} is there already, and public: make it private in its settings, "
                f"or choose another name. {folder} is complete"
            )
        say(f"to {hub.endpoint}/{name}, which is {'private' if hidden else 'public'}:")
        for file in sorted(folder.iterdir()):
            say(f"  {file.name}, {file.stat().st_size:,} bytes")
        if new:
            hub.create_repo(name, private=private)
        hub.upload_folder(repo_id=name, folder_path=folder)
    except ExportError:
        raise
    except Exception as error:
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ExportError(
            f"{folder} is complete, but isn't at {name}: {why} `hf upload {name} {folder}` tries "
            "again"
        ) from error
