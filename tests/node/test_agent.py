"""What is true of an agent whatever its world is; tests/simulation puts whole clusters of them to
the test."""

from __future__ import annotations

import subprocess
import sys


def test_it_needs_no_loop_no_socket_and_no_tensor() -> None:
    heavy = ["asyncio", "torch", "grpc"]
    check = (
        "import sys; before = set(sys.modules); import planaria.node.agent;"
        f"print([name for name in {heavy} if name in sys.modules.keys() - before])"
    )
    found = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "[]"
