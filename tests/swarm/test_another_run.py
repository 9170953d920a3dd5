"""Another run's registry answers at the address of a run's registry, and the run goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from planaria.bootstrap.invites import encode
from planaria.node.report.ledger import audit
from tests.swarm.machines import machines


@pytest.mark.parametrize("secured", [True, False])
async def test_a_run_goes_on_while_another_runs_registry_answers(
    data: Path, tmp_path: Path, secured: bool
) -> None:
    with machines(tmp_path, data, 1, secured=secured) as here:
        address = await here.registry_with_journal()
        join = encode(await here.invite("owner")) if secured else address
        for name, stage in (("a", "0"), ("b", "1")):
            here.start_node(name, join, None, "--stage", stage, *here.saved(name))
        await here.committed(beyond=1)
        here.processes.kill("registry")
        other = tmp_path / "other.toml"
        other.write_text("seed = 77\n" + (tmp_path / "run.toml").read_text().replace("seed", "#"))
        authority = ["--authority", str(tmp_path / "other")] if secured else []
        run = ["bootstrap", "--run", str(other), "--listen", address, *authority]
        here.processes.start("other", run, None)
        await here.logged("a", "is away (" if secured else "this registry serves run")
        newest = await here.committed(beyond=0)
        await here.committed(beyond=newest + 20)
        here.processes.kill("b")
        here.start_node("again", join, None, "--stage", "1", *here.saved("b"))
        await here.logged("again", "does not answer" if secured else "this registry serves run")
        here.processes.kill("other")
        here.start_registry(address, None, "--journal", str(tmp_path / "journal"))
        await here.logged("a", "the registry is back")
        newest = await here.committed(beyond=newest)
        await here.committed(beyond=newest + 2)
        assert here.processes.running().keys() >= {"a", "again", "registry"}
        assert "joining again" not in here.logs()
    audited = audit(tmp_path / "a")
    assert (audited.duplicates, audited.missing, audited.extra) == (0, 0, 0)
