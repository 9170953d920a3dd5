"""The command that trains on this machine alone."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext

import typer

from planaria.node.commands.terminal import console, say, tracking
from planaria.node.launch.options import Security, check_tracker, flattened
from planaria.node.local.options import UpOptions


@flattened
def up_command(options: UpOptions) -> None:
    """Train with a whole swarm on this machine."""
    from planaria.node.data.progress import untracked
    from planaria.node.launch.errors import SwarmError
    from planaria.node.launch.resolve import text_to_prepare
    from planaria.node.local.loss_schedule import choose_losses, parse_kill
    from planaria.node.local.plan import plan_run, read_plan
    from planaria.node.local.resume import continued_run, with_settings_of
    from planaria.node.local.swarm import up
    from planaria.node.run_file import PRIVATE, RunFile, load

    check_tracker(options.swarm.track)
    page = Security().page_address(options.swarm.http, insecure=True)
    if page is not None and not page.listen.is_loopback:
        raise SwarmError(
            f"--http {page.listen}: planaria up shows its page on this machine only. Give "
            "127.0.0.1:PORT, and forward that port to where you look at it, for example by ssh -L"
        )
    changes, losses = options.changes, options.losses
    if options.resume is not None:
        if options.save_dir is not None:
            raise SwarmError(
                "--save-dir: --resume continues in the run's own folders; leave it out. --out NEW "
                "continues in a copy of them"
            )
        resumed = read_plan(options.resume, options.data or ())
        file, run = options.run_file, resumed.run
        wanted = changes.applied_to(run if file is None else with_settings_of(load(file), run))
        device = options.device or resumed.device
        plan = resumed._replace(out=options.out or resumed.out, at=options.at, device=device)
        run = continued_run(resumed.kept._replace(out=plan.out), wanted, options.at is not None)
        plan = plan._replace(run=run.model_copy(update={PRIVATE: wanted.notify}))
    else:
        if options.data:
            raise SwarmError("--data: a new run's data is data.path in its run file")
        if options.at is not None:
            raise SwarmError("--at: a new run has no saves; give --resume DIR, too")
        resumed = None
        file = options.run_file
        run = changes.applied_to(RunFile() if file is None else load(file))
        shown = tracking("documents") if text_to_prepare(run) else nullcontext(untracked)
        with shown as progress:
            device = options.device or "auto"
            plan = plan_run(run, options.out, options.save_dir, device, say, progress)
    plan = plan._replace(options=options.swarm)
    kills = [parse_kill(text, plan.run) for text in losses.kill or []]
    drawn = choose_losses(plan.run, losses.loss_rate, losses.trace, losses.speedup)
    ending = asyncio.run(up(plan, kills, console, resumed, losses.replace, drawn))
    raise typer.Exit(ending.status)
