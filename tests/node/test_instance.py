"""The id that a node keeps."""

from pathlib import Path

import pytest

from planaria.node.instance import find_instance, release


def test_a_node_that_is_started_again_is_the_same_instance(tmp_path: Path) -> None:
    first = find_instance(tmp_path / "state")
    release(first)
    again = find_instance(tmp_path / "state")
    assert again.id == first.id
    assert len(first.id) == 32
    release(again)


def test_nodes_that_share_a_folder_are_instances_of_their_own(tmp_path: Path) -> None:
    one, two = find_instance(tmp_path), find_instance(tmp_path)
    assert one.id != two.id
    release(one)
    third = find_instance(tmp_path)
    assert third.id == one.id
    release(two)
    release(third)


@pytest.mark.parametrize("content", ["", "0" * 31, "x" * 32, "0" * 64, "\N{SNOWMAN}"])
def test_a_file_with_something_else_gets_an_id(tmp_path: Path, content: str) -> None:
    (tmp_path / "instance-0").write_text(content, encoding="utf-8")
    found = find_instance(tmp_path)
    assert len(found.id) == 32
    assert set(found.id) <= set("0123456789abcdef")
    assert (tmp_path / "instance-0").read_text() == f"{found.id}\n"
    release(found)


def test_without_a_folder_an_instance_is_a_process(tmp_path: Path) -> None:
    assert find_instance(None).id != find_instance(None).id
    file = tmp_path / "file"
    file.touch()
    found = find_instance(file / "state")
    assert (len(found.id), found.held) == (32, None)
