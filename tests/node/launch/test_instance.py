"""Tests of the key that a node keeps over its starts."""

from pathlib import Path

import pytest

from planaria.node.launch.instance import find_instance, release_key


def test_a_node_that_is_started_again_is_the_same_instance(tmp_path: Path) -> None:
    first = find_instance(tmp_path / "state")
    release_key(first)
    again = find_instance(tmp_path / "state")
    assert again.identity.public == first.identity.public
    assert (tmp_path / "state" / "instance-0").stat().st_mode & 0o777 == 0o600
    release_key(again)


def test_nodes_that_share_a_folder_are_instances_of_their_own(tmp_path: Path) -> None:
    first, second = find_instance(tmp_path), find_instance(tmp_path)
    assert first.identity.instance != second.identity.instance
    release_key(first)
    third = find_instance(tmp_path)
    assert third.identity.instance == first.identity.instance
    release_key(second)
    release_key(third)


@pytest.mark.parametrize("content", ["", "0" * 32, "x" * 8000, "\N{SNOWMAN}"])
def test_a_file_with_something_else_gets_a_key(tmp_path: Path, content: str) -> None:
    (tmp_path / "instance-0").write_text(content, encoding="utf-8")
    instance = find_instance(tmp_path)
    assert (tmp_path / "instance-0").read_bytes() == instance.identity.to_pem()
    release_key(instance)


def test_without_a_folder_an_instance_is_a_process(tmp_path: Path) -> None:
    assert find_instance(None).identity.public != find_instance(None).identity.public
    file = tmp_path / "file"
    file.touch()
    assert find_instance(file / "state").lock is None
