"""The build context has all that the image needs, and docker/check.sh reads keys that exist."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
import zipfile
from pathlib import Path, PurePosixPath

import pytest

from planaria.bootstrap import registry_pb2 as pb
from planaria.node.data.corpus import FORMAT, SPLITS, Index, Split
from planaria.node.page.status_page import description_json

ROOT = Path(__file__).parent.parent


def pattern(text: str) -> re.Pattern[str]:
    """The regex of a line of .dockerignore: `*` and `?` match in one name, `**/` any folders."""
    parts = re.split(r"(\*\*/|\*|\?)", text.strip("/"))
    meaning = {"**/": "(?:.*/)?", "*": "[^/]*", "?": "[^/]"}
    return re.compile("".join(meaning.get(part, re.escape(part)) for part in parts))


class Ignored:
    """A .dockerignore as the builder reads it. A line is about a path and all that is below it; the
    last line about a path decides."""

    def __init__(self, file: Path) -> None:
        lines = [line for line in file.read_text().splitlines() if line and line[0] != "#"]
        self.lines = [(pattern(line.removeprefix("!")), line[0] != "!") for line in lines]

    def __call__(self, path: PurePosixPath) -> bool:
        ignored = False
        places = [str(path), *map(str, path.parents)]
        for about, ignore in self.lines:
            if any(about.fullmatch(place) for place in places):
                ignored = ignore
        return ignored


def copy_context(to: Path) -> None:
    """Copies what a builder sees of this repository. No line lets in part of an ignored folder."""
    ignored = Ignored(ROOT / ".dockerignore")

    def left_out(folder: str, names: list[str]) -> list[str]:
        place = PurePosixPath(Path(folder).relative_to(ROOT))
        return [name for name in names if ignored(place / name)]

    shutil.copytree(ROOT, to, symlinks=True, ignore=left_out)


def run(*command: str | Path, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def files(package: Path) -> set[str]:
    """The paths of a package's files, from the package's name on."""
    return {
        str(path.relative_to(package.parent))
        for folder, _, names in os.walk(package, followlinks=True)
        for path in (Path(folder) / name for name in names)
        if "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of the image's context, built as in the image: by installed tools, offline."""
    tmp_path = tmp_path_factory.mktemp("image")
    copy_context(tmp_path / "context")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-index"]
    options = ["--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path]
    run(*pip, *options, tmp_path / "context", cwd=tmp_path)
    [wheel] = tmp_path.glob("*.whl")
    return wheel


def test_the_images_wheel_has_all_files_of_the_packages(wheel: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == set().union(*(files(ROOT / package) for package in packages))


def test_the_images_wheel_starts_in_an_environment_of_its_own(wheel: Path, tmp_path: Path) -> None:
    """The new environment takes its other packages from this one."""
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "own", cwd=tmp_path)
    python = tmp_path / "own/bin/python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
    run(*pip, "install", "--quiet", "--no-index", "--no-deps", wheel, cwd=tmp_path)
    [packages] = (tmp_path / "own").glob("lib/python*/site-packages")
    others = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    lines = [f"import site; site.addsitedir({path!r})" for path in others]
    (packages / "others.pth").write_text("\n".join(lines))
    loaded = run(python, "-c", "import planaria; print(planaria.__file__)", cwd=tmp_path)
    assert Path(loaded.strip()).is_relative_to(packages)
    usage = run(tmp_path / "own/bin/planaria", "--help", cwd=tmp_path)
    for command in ("up", "node", "bootstrap"):
        assert f" {command} " in usage


def test_what_the_dockerfile_copies_is_let_in() -> None:
    ignored = Ignored(ROOT / ".dockerignore")
    needed = [
        "constraints.txt",
        "planaria/corpus/austen",
        "docker/entrypoint.sh",
        "docker/healthcheck.py",
    ]
    assert [path for path in needed if ignored(PurePosixPath(path))] == []
    assert ignored(PurePosixPath(".git/HEAD"))
    assert ignored(PurePosixPath("planaria/node/__pycache__"))


WITHOUT = """
import sys

sys.modules.update(dict.fromkeys(sys.argv.pop(1).split("|")))  # as if they were not installed
from planaria.node.cli import main

main()
"""


def test_the_registrys_image_lacks_only_what_a_registry_does_without(tmp_path: Path) -> None:
    """Runs a registry that reads prepared data, and asks for its status."""
    [lacking] = re.findall(
        r"grep -vE '\^\((torch\|[\w|]+)\)", (ROOT / "docker/Dockerfile").read_text()
    )
    split = Split(documents=1, text_bytes=1, shards=[])
    index = Index(
        format=FORMAT,
        vocabulary=300,
        dtype="uint16",
        end_of_document=0,
        tokenizer="",
        splits=dict.fromkeys(SPLITS, split),
    )
    index.content = index.content_hash()
    (tmp_path / "index.json").write_text(index.model_dump_json())
    (tmp_path / "run.toml").write_text(f"[data]\npath = {str(tmp_path)!r}\n")
    address = tmp_path / "address"
    planaria = [sys.executable, "-c", WITHOUT, lacking]
    where = ["--run", tmp_path / "run.toml", "--journal", tmp_path / "journal"]
    listen = ["--listen", "127.0.0.1:0", "--address-file", address]
    registry = subprocess.Popen([*planaria, "bootstrap", *where, *listen], cwd=ROOT)
    try:
        while not address.exists():
            assert registry.poll() is None
            time.sleep(0.02)
        status = run(*planaria, "status", "--join", address.read_text().strip(), "--json", cwd=ROOT)
    finally:
        registry.terminate()
        registry.wait()
    assert "vocabulary = 300" in json.loads(status)["run_file"]


def asked_by_the_check(command: str) -> list[str]:
    """The expressions that docker/check.sh passes to one of its functions."""
    script = (ROOT / "docker/check.sh").read_text()
    return re.findall(rf"\b{command} '([^']+)'", script)


def test_what_the_check_asks_of_the_status_is_in_it() -> None:
    description = pb.Description()
    for place in range(5):
        member = pb.Member(node=f"n{place}", host=f"h{place}", seats=[pb.Seat(stage=place)])
        description.view.members.append(member)
        seats = [pb.SeatReport(stage=place, committed=40 + place)] if place else []
        description.members.add(member=member, report=pb.Report(seats=seats))
    run = json.loads(description_json(description))
    committed, nodes, victims = asked_by_the_check("ask")
    assert eval(committed, {"run": run}) == 44
    assert eval(f"[{nodes}]", {"run": run}) == ["n1", "n2", "n3", "n4"]
    assert eval(f"[{victims}]", {"run": run}) == ["h2"]
