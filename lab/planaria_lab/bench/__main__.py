"""Run the benchmarks of `make bench`, one after the other."""

from __future__ import annotations

from planaria_lab.bench import (
    blinking,
    checks,
    copying,
    driver,
    fetching,
    frozen,
    handshakes,
    join,
    joins,
    large,
    left,
    link,
    many,
    masking,
    onlooking,
    peft_speed,
    pipeline,
    planned,
    preparing,
    recovery,
    registry,
    replica_loss,
    simulator,
    slow_disk,
    spot_checks,
    strangers,
    trust,
    two_machines,
    unequal,
    views,
    wan,
)


def main() -> None:
    for title, measure in (
        ("Swarm against one process", pipeline.main),
        ("Swarm with adapters against peft", peft_speed.main),
        ("Links with delay against links without", wan.main),
        ("A plan against its simulation and a live run", planned.main),
        ("Checks of numbers against the step that they belong to", checks.main),
        ("Being ready for losses against not being ready", recovery.main),
        ("Frames on links against bare bytes on the same gRPC stream", link.main),
        ("Urgent frames beside a copy against none, on a slow link", copying.main),
        ("A state from three sources at once against plain TCP", fetching.main),
        ("Links that break again and again against links that hold", blinking.main),
        ("What a step costs its driver, by the number of nodes", driver.main),
        ("Renewals at the registry", registry.main),
        ("A join announced by a difference against one announced by the whole view", views.main),
        ("10,000 nodes that join an empty run", joins.main),
        ("Joins while strangers flood the registry against joins without", strangers.main),
        ("Links' handshakes under TLS against those in plain text", handshakes.main),
        ("A swarm under TLS against one in plain text, and its signatures", trust.main),
        ("The stall when a replica joins", join.main),
        ("Two nodes, one four times as fast, against each alone", unequal.main),
        ("Two machines behind a link against the first one alone", two_machines.main),
        ("The loss of a replica in the middle of a step", replica_loss.main),
        ("From the loss of a stage's only node to the next commit, in steps", left.main),
        ("Sixty nodes on this machine, of which ten are lost, against ten nodes", many.main),
        ("Memory of 124M parameters, and of a stage of 1.2G, against the plan's", large.main),
        ("Memory of adapters beside frozen weights, against the plan's", frozen.main),
        ("A swarm beside exports and generation against one alone", onlooking.main),
        ("The reordering of stacks when 400 of 1000 groups are lost", masking.main),
        ("A disk that takes 5 s an fsync against quick ones", slow_disk.main),
        ("Visits computed twice, to be compared, against none", spot_checks.main),
        ("Text to tokens against datasets.map", preparing.main),
        ("100,000 nodes in simulated time", simulator.main),
    ):
        print(f"\n== {title}", flush=True)
        measure()


if __name__ == "__main__":
    main()
