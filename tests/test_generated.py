"""The committed stubs are those that protoc generates from the .proto files."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROTOS = sorted((ROOT / "proto").rglob("*.proto"))


@pytest.mark.parametrize("proto", PROTOS, ids=lambda path: path.stem)
def test_stubs_are_fresh(proto: Path, tmp_path: Path):
    name = proto.relative_to(ROOT / "proto")
    kinds = ["python", "pyi"]
    outputs = [f"--{kind}_out={tmp_path}" for kind in kinds]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", str(ROOT / "proto"), *outputs]
    subprocess.run([*command, str(name)], check=True)
    fresh = sorted(path for path in tmp_path.rglob("*.py*"))
    assert len(fresh) == len(kinds)
    for path in fresh:
        committed = ROOT / path.relative_to(tmp_path)
        assert committed.read_text() == path.read_text(), f"{committed} is stale: run `make proto`"


def test_no_package_is_named_proto():
    assert not (ROOT / "proto" / "__init__.py").exists()
