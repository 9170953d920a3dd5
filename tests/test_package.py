"""What is installed: one import package, and no module under two names; what extras bring."""

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import planaria
from planaria.node.cli import app
from planaria.node.machine.extras import EXTRAS, remedy

ROOT = Path(__file__).parent.parent
FOLDERS = ("bootstrap", "node", "recovery")

COMMAND = """
import sys

sys.modules.update(dict.fromkeys(sys.argv.pop(1).split(",")))  # as if they were not installed
from planaria.node.cli import main

main()
"""


def python(
    *arguments: str | Path, cwd: Path = ROOT, status: int = 0
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == status, done.stderr
    return done


def test_the_folders_of_the_repository_are_the_packages():
    for folder in ("corpus", *FOLDERS):
        link = ROOT / folder
        assert link.is_symlink(), f"{link} is a copy: git's core.symlinks is off"
        assert link.resolve() == ROOT / "planaria" / folder


def test_a_checkout_that_is_not_installed_has_no_version_and_works(monkeypatch) -> None:
    assert planaria.__version__ == version("planaria")

    def unknown(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", unknown)
    assert planaria.__version__ == "unknown"


def test_neither_the_package_nor_its_tests_import_the_lab():
    files = [path for folder in ("planaria", "tests") for path in (ROOT / folder).rglob("*.py")]
    importing = re.compile(r"^\s*(from|import) planaria_lab\b", re.M)
    assert [path for path in files if importing.search(path.read_text())] == []


def test_no_class_name_occurs_twice():
    names = Counter(
        name
        for path in (ROOT / "planaria").rglob("*.py")
        for name in re.findall(r"(?m)^class (\w+)", path.read_text())
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_the_map_names_what_there_is():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"[\w/]*\w+/\w+\.py\b", text))
    assert named
    for path in named:
        assert any((ROOT / top / path).exists() for top in ("", "node")), path


def commands(command: Any, name: str = "planaria") -> Iterator[tuple[str, Any]]:
    yield name, command
    if hasattr(command, "list_commands"):
        for each in command.list_commands(None):
            yield from commands(command.get_command(None, each), f"{name} {each}")


def test_no_command_writes_among_the_results_without_being_told():
    named = dict(commands(get_command(app)))
    assert "planaria up" in named
    for name, command in named.items():
        for option in command.params:
            if isinstance(option.default, str | Path) and "/" in str(option.default):
                assert Path(option.default).parts[0] == "out", f"{name} {option.opts}"


def contents(wheel: Path) -> dict[str, int]:
    """The checksums of a wheel's files, by name."""
    return {file.filename: file.CRC for file in zipfile.ZipFile(wheel).infolist()}


def built(project: Path, tmp_path: Path) -> set[str]:
    """The files of a project's wheel. Checks that its sdist gives the same wheel."""
    build = ("-m", "hatchling", "build", "-d")
    python(*build, tmp_path, "-t", "wheel", "-t", "sdist", cwd=project)
    [wheel], [sdist] = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        assert not [file.name for file in archive if file.issym() or file.islnk()]
        archive.extractall(tmp_path / "sdist", filter="data")
    [source] = (tmp_path / "sdist").iterdir()
    python(*build, tmp_path / "again", "-t", "wheel", cwd=source)
    [again] = (tmp_path / "again").glob("*.whl")
    assert contents(again) == contents(wheel)
    return {name for name in contents(wheel) if ".dist-info/" not in name}


def test_wheel_and_sdist_install_one_package(tmp_path):
    files = built(ROOT, tmp_path)
    assert {name.partition("/")[0] for name in files} == {"planaria"}
    assert "planaria/corpus/austen/persuasion.txt" in files, "the first run has no text"
    for name in ("page.html", "page.css", "page.js"):
        assert f"planaria/node/page/static/{name}" in files, "the page lacks a file"
    assert "planaria/py.typed" in files


@pytest.mark.parametrize("arguments", [[], ["bootstrap"], ["node"]])
def test_help_loads_no_heavy_module(arguments):
    code = (
        "import sys, planaria.node.cli\n"
        "planaria.node.cli.app([*sys.argv[1:], '--help'], standalone_mode=False)\n"
        "print(sorted({'torch', 'numpy', 'grpc', 'tokenizers', 'pyarrow'} & set(sys.modules)))"
    )
    shown = python("-c", code, *arguments)
    assert shown.stdout.splitlines()[-1] == "[]", shown.stderr


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("local.swarm", {"torch"}),
        ("launch.supervisor, planaria.node.cli", {"torch", "grpc", "numpy"}),
        ("agent", {"torch", "grpc", "asyncio"}),  # with the step transaction and its events
    ],
)
def test_what_decides_or_watches_loads_no_heavy_module(module, heavy):
    """A swarm needs torch only in its nodes, and an agent neither loop, socket nor tensor."""
    code = f"import sys, planaria.node.{module}; print(*sorted({heavy} & set(sys.modules)))"
    assert python("-c", code).stdout == "\n"


def test_who_serves_no_page_loads_no_web_server():
    code = (
        "import sys\n"
        "from planaria.node.launch.options import Security\n"
        "assert Security().page_address('none', False) is None\n"
        "Security().page_address('127.0.0.1:7410', False)\n"
        "print(sorted({'starlette', 'uvicorn', 'prometheus_client'} & set(sys.modules)))"
    )
    assert python("-c", code).stdout == "[]\n"


def test_the_package_itself_loads_nothing():
    code = "import sys; old = set(sys.modules); import planaria; print(set(sys.modules) - old)"
    assert python("-c", code).stdout == "{'planaria'}\n"


def test_who_lacks_an_extra_is_told_which_to_install(tmp_path):
    arguments = ["up", "--track", "tensorboard"]
    done = python("-c", COMMAND, "tensorboardX", *arguments, cwd=tmp_path, status=1)
    says = "error: tensorboardX is not installed: pip install 'planaria[tensorboard]'"
    assert done.stderr.splitlines()[-1] == says


def test_the_extras_bring_what_is_said():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for library, extra in EXTRAS.items():
        brought = [re.split("[<>=]", name)[0] for name in project["optional-dependencies"][extra]]
        from_there = packages_distributions().get(library, brought)  # tests lack some extras
        assert set(from_there) & set(brought), library


def test_other_missing_modules_are_errors_of_ours():
    with pytest.raises(ModuleNotFoundError, match="torhc"):
        remedy(ModuleNotFoundError("No module named 'torhc'", name="torhc"))
