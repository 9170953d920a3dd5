"""Checks of run files: keys, bounds, and settings that depend on others."""

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic.fields import FieldInfo
from typer.testing import CliRunner

from planaria.bootstrap.rules import MembershipRules
from planaria.bootstrap.service import PAUSED_ABOVE
from planaria.node.cli import app
from planaria.node.launch.resolve import registry_rules, run_id
from planaria.node.launch.settings import differences
from planaria.node.model.learning_rate import boost, peak_of, scheduled_rate, warmup_of
from planaria.node.run_file import (
    HEARTBEAT,
    LEASE,
    MOST_NODES,
    MOST_PARAMETERS,
    MOST_PAYLOAD,
    RunFile,
    RunFileError,
    Section,
    dumps,
    from_fields,
    load,
    loads,
    override,
    without_private,
)
from planaria.node.wire.frame_format import PAYLOAD_LIMIT
from planaria.node.wire.link import LinkSettings


def test_times_and_bounds_are_those_of_links_and_registry() -> None:
    assert LinkSettings().heartbeat == HEARTBEAT
    assert LEASE >= PAUSED_ABOVE
    assert MOST_PAYLOAD == PAYLOAD_LIMIT
    assert MembershipRules("run", 1).max_nodes == MOST_NODES


OUT_OF_BOUNDS = {
    "model": [
        ("dim = 1_000_000_000", "model.dim: .*less than or equal to 131072 .value: 1000000000"),
        ("stages = 10_000_000", "model.stages: must be a number of stages, at most 1024"),
        (
            "stages = []",
            "model.stages: must be a number of stages, at most 1024, or a list of each",
        ),
        ("stages = [4, 0]", "model.stages: must be a number of stages"),
        ("stages = [16384, 1]", "model.stages: must be a number of stages"),
        ("stages = true", "model.stages: must be a number of stages"),
        ("stages = [2, 1]", r"model: stages = .2, 1. has 3 layers, and the model layers = 4: give"),
        ("dim = 64\nheads = 3", "model: dim = 64 must be a multiple of heads = 3"),
        ("dim = 65536\nlayers = 1024", "model: a body stage has 1.*e.13 parameters, .* TiB .*dim"),
        ("vocabulary = 16000000\ndim = 131072", "model: stage 0 has 4.19e.12 parameters"),
        ("rope_theta = nan", "model.rope_theta: .*finite"),
        (
            "module = 'a:b'\nattn_mask_type = 'block_causal'",
            "is not supported by a:b, whose samples",
        ),
        ("attn_mask_type = 'full'", "model.attn_mask_type: .*'causal' or 'block_causal'"),
        ("attn_mask_type = 'block_causal'\n[wire]\nactivations = 'int4'", None),
        (
            "context = 4194304\n[training]\nmicrobatch = 16",  # no frame can carry it
            "training.microbatch = 16: with model.context = 4194",
        ),
        ("from = 'm'\npreset = 'small'", "preset = small and from = m are two models"),
    ],
    "training": [
        ("lr = inf", "training.lr: Input should be a finite number .value: inf"),
        ("lr = -inf", "training.lr: .*finite"),
        ("clip = nan", "training.clip: .*finite"),
        ("lr = 1e9", "training.lr: .*less than or equal to 100"),
        ("batch = 15", "training: batch = 15 is not a multiple of microbatch = 2"),
        ("batch = 1_000_000\nmicrobatch = 1", "training.batch = 1000000: .*larger microbatches"),
        ("batch = 65536\nmicrobatch = 65536", None),
        ("betas = [0.9, 1.0]", r"training.betas.1: .*less than 1"),
        ("betas = [0.9]", r"training.betas.1: Field required"),
        ("weight_decay = -0.1", "training.weight_decay: .*greater than or equal to 0"),
        ("lr = 2\nweight_decay = 0.5", "training.weight_decay = 0.5: .* 1.1 of it.* less than 1"),
        (
            'optimizer = "muon"\nmuon_lr = 2\nweight_decay = 0.5',
            "training.weight_decay = 0.5: .* 1.1 of it.* less than 1",
        ),
        (
            'optimizer = "adamw"\nmuon_lr = 0.05',
            "muon_lr = 0.05 is for training.optimizer = muon, and this run has adamw: set",
        ),
        ("muon_lr = 0.02", None),
        ('optimizer = "sgd"', "training.optimizer: .*'adamw' or 'muon' .value: 'sgd'"),
        ("schedule = 'sine'", "training.schedule: .*'cosine', 'linear', 'constant' or 'wsd'"),
        ("schedule = 'wsd'\ndecay_share = 0.95", "warmup = 10 steps and .* = 0.95 of steps = 100"),
        ("schedule = 'wsd'\ndecay_share = 0.9", None),
        ("decay_share = 0", "training.decay_share: .*greater than 0"),
    ],
    "swarm": [
        ("lease = 0.8", "swarm.lease.*greater than or equal to 1"),
        ("silence = 0.9", "swarm.silence.*greater than or equal to 1"),
        ("progress = 8", "with lease = 5 and silence = 3 it can take 5 s .*progress = 10 or more"),
        ("progress = 50\nsilence = 30", "it can take 30 s .*progress = 60 or more"),
        ("progress = 50\nlease = 60", "it can take 60 s .*progress = 120 or more"),
        ("lease = 1\nsilence = 1\nprogress = 5\n[recovery.relearn]\nseconds = 2", None),
        ("lease = 1e-9", "swarm.lease: .*greater than or equal to 1"),
        ("silence = inf", "swarm.silence: .*finite"),
        ("progress = nan", "swarm.progress: .*finite"),
        ("replicas = 5000", "swarm.replicas = 5000: of 5 stages .* 25000 nodes, .* most 10000"),
    ],
}


@pytest.mark.parametrize(
    ("section", "lines", "problem"),
    [(section, *each) for section, some in OUT_OF_BOUNDS.items() for each in some],
)
def test_what_can_not_be_is_refused(section: str, lines: str, problem: str | None) -> None:
    if problem is None:
        loads(f"[{section}]\n{lines}")
    else:
        with pytest.raises(RunFileError, match=problem):
            loads(f"[{section}]\n{lines}")


@pytest.mark.parametrize("command", ["up", "bootstrap"])
def test_all_commands_refuse_alike(command: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[model]\ndim = 1_000_000_000\n")
    arguments = {
        "up": ["up", str(path), "--out", str(tmp_path / "out")],
        "bootstrap": ["bootstrap", "--listen", "127.0.0.1:0", "--run", str(path)],
    }
    result = CliRunner().invoke(app, arguments[command])
    message = " ".join(result.output.split())
    assert result.exit_code == 1
    assert f"{path} is not a valid run file: model.dim: Input should be less" in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[training]\nmicrobatches = 3",
            "training.microbatches: is no key; did you mean microbatch?",
        ),
        ("[model]\nstage = 3", "model.stage: is no key; did you mean stages?"),
        ("replicas = 3", "replicas: is no key; did you mean swarm.replicas?"),
        ("[training]\nbase = 'nf4'", "training.base: is no key; did you mean training.lora.base?"),
        ("lr = 3", "lr: is no key; did you mean training.lr or recovery.relearn.lr?"),
        ("[recovery.snapshot]\nperiods = 3", "recovery.snapshot.periods: is no .* mean period?"),
        ("[trainin]\nlr = 1.0", "trainin: is no key; did you mean training?"),
        ("[swarm]\nxyzzy = 3", "swarm.xyzzy: is no key; swarm has replicas, start_grace, lease, "),
    ],
)
def test_a_misspelt_key_is_told_the_right_one(text: str, message: str) -> None:
    with pytest.raises(RunFileError, match=message.replace("?", r"\?")):
        loads(text)


def test_a_file_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("steps = 7", encoding="utf-8-sig")
    assert load(tmp_path / "run.toml").steps == 7


def test_a_tilde_is_expanded_where_the_file_lies_and_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    text = '[model]\nfrom = "~/x"\n[[data.corpora]]\npath = "~/y"\n[recovery.checkpoint]\ndir = "~"'
    (tmp_path / "run.toml").write_text(text)
    run = load(tmp_path / "run.toml")
    folders = run.model.origin, run.data.names, run.recovery.checkpoint.dir
    assert folders == ("/home/ada/x", ["/home/ada/y"], "/home/ada")
    assert loads(text).model.origin == "~/x"


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xff\xfe\x00")
    result = CliRunner().invoke(app, ["bootstrap", "--listen", "127.0.0.1:0", "--run", str(path)])
    assert result.exit_code == 1
    assert "is not text" in " ".join(result.output.split())


NUMBERS = st.one_of(
    st.integers(-3, 300),
    st.integers(),
    st.floats(),
    st.sampled_from([10**9, 2**31, 2**63, 1e-9, 1e-300, 1e300]),
)


def of_field(field: FieldInfo) -> st.SearchStrategy[Any]:
    """Return a strategy for values of the field, right or wrong."""
    kind = field.annotation
    if isinstance(kind, type) and issubclass(kind, Section):
        return of_section(kind)
    likely = [st.just(field.get_default(call_default_factory=True)), NUMBERS]
    sizes = st.lists(st.integers(-1, 5), max_size=5)
    return st.one_of(*likely, *likely, st.text(max_size=8), st.booleans(), st.none(), sizes)


def of_section(section: type[Section]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {}, optional={name: of_field(field) for name, field in section.model_fields.items()}
    )


ANYTHING = st.recursive(
    st.one_of(NUMBERS, st.text(), st.none(), st.binary()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
KEYS = [*RunFile.model_fields]


@settings(deadline=None, max_examples=300)
@given(
    st.one_of(
        of_section(RunFile),
        of_section(RunFile),
        st.dictionaries(st.sampled_from(KEYS) | st.text(), ANYTHING, max_size=4),
    )
)
def test_whatever_it_says_it_is_bounded_or_refused(fields: dict[str, Any]) -> None:
    try:
        run = from_fields(fields)
    except RunFileError as error:
        assert any(key in str(error) for key in fields)
        assert "nan is not" not in str(error)
        return
    assert loads(dumps(run)) == run
    config, training, recovery = run.model.config, run.training, run.recovery
    assert max(config.parameters) <= MOST_PARAMETERS
    assert 0 < training.microbatches <= 2**24
    assert run.steps * training.batch * config.context < 2**63
    rates = [
        scheduled_rate(step, run.steps, peak_of(run), warmup_of(run), 0.1)
        for step in (1, run.steps)
    ]
    rates.append(boost(2, 1, recovery.lr_boost, recovery.lr_boost_steps))
    snapshot = recovery.snapshot
    rates += [1 / snapshot.fraction, 1 / snapshot.mbps, 1 / training.clip]
    assert all(math.isfinite(rate) and 0 <= rate < 1e7 for rate in rates)
    swarm = run.swarm
    assert LEASE <= swarm.lease <= swarm.progress <= 86_400
    rules = registry_rules(loads("[model]\nstages = 2").model_copy(update={"swarm": swarm}))
    assert 0 < rules.grace <= 4000
    assert swarm.silence >= 2 * LinkSettings().heartbeat


def test_a_rank_tells_runs_apart_only_where_averaging_goes_by_it() -> None:
    assert (
        loads("[wire]\nrank = 8\nrank_after = 9").identifying_fields()
        == RunFile().identifying_fields()
    )
    low = loads("[wire]\naveraging = 'lowrank'\nrank = 8\nrank_after = 9")
    assert {"averaging": "lowrank", "rank": 8, "rank_after": 9}.items() <= low.identifying_fields()[
        "wire"
    ].items()
    codecs = ("lowrank", "int8")
    averaged_after = [override(low, wire__averaging=codec).wire.averaging_after for codec in codecs]
    assert averaged_after == [9, 0]
    with pytest.raises(RunFileError, match=r"wire\.rank"):
        loads("[wire]\naveraging = 'lowrank'\nrank = 0")


@pytest.mark.parametrize(
    ("text", "optimizer"),
    [
        ("", "muon"),
        ('model.preset = "small"', "muon"),
        ('model.from = "elsewhere"', "adamw"),
        ('model.from = "elsewhere"\ntraining.lora = {}', "adamw"),
        ('model.config = "elsewhere"', "adamw"),
        ('model.module = "examples.gpt2:build"', "adamw"),
        ('model.module = "examples.gpt2:build"\ntraining.optimizer = "muon"', "muon"),
        ('training.optimizer = "adamw"', "adamw"),
    ],
)
def test_a_preset_has_muon_and_all_else_adamw(text: str, optimizer: str) -> None:
    run = loads(text)
    assert run.optimizer == optimizer
    assert run.config.muon == (optimizer == "muon")


def test_a_run_by_adamw_keeps_the_id_of_versions_that_had_nothing_else() -> None:
    adamw = loads('training.optimizer = "adamw"')
    assert "training" not in adamw.identifying_fields()
    default = RunFile().identifying_fields()
    assert default["training"] == {"optimizer": "muon", "lr": 2e-3, "muon_lr": 0.01}
    assert override(RunFile(), training__optimizer="muon").identifying_fields() == default


def test_who_hears_of_events_is_no_part_of_the_run_and_nobody_elses_business() -> None:
    run = loads('steps = 7\n[notify]\ncommand = "curl -d @- https://example.org/s3cret"')
    assert run_id(run) == run_id(loads("steps = 7"))
    assert differences(run, loads("steps = 7")) == {}
    assert "notify" not in without_private(run) and loads(without_private(run)).steps == 7
    assert loads(dumps(run)).notify == run.notify
