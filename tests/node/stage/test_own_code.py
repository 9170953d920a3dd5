"""Models by a run's own code: how stages use it, and how invalid code is refused."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from planaria.node.hugging_face.export import ModelParts, export
from planaria.node.hugging_face.whole_model import WholeModel
from planaria.node.launch.begin import check_module
from planaria.node.launch.errors import NodeError
from planaria.node.launch.resolve import resolve
from planaria.node.model.config import UnsupportedModelError
from planaria.node.model.layout import model_weights
from planaria.node.model.modules import build_stage, copy_with, empty_stage
from planaria.node.model.shape import ModelConfig, named_shapes
from planaria.node.run_file import RunFile, RunFileError, dumps, loads, override
from planaria.node.serve import find_own_code
from planaria.node.stage.optimizer import StageOptimizer
from planaria.node.stage.own_code import OwnCodeError, add_parts, load_architecture, load_checked

ROOT = Path(__file__).parents[3]
GPT2 = (ROOT / "examples/gpt2.py").read_text()
RUN = loads("""
[model]
module = "examples.gpt2:build"
vocabulary = 40
dim = 16
heads = 2
layers = 4
stages = 2
context = 8
""")
numbers = itertools.count()


def written(folder: Path, code: str, monkeypatch: pytest.MonkeyPatch) -> RunFile:
    """Return a run whose architecture is this code, in a module that is not loaded yet."""
    name = f"own{next(numbers)}"
    (folder / f"{name}.py").write_text(code)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return override(RUN, model__module=f"{name}:build")


def built(run: RunFile) -> tuple[ModelConfig, Any]:
    """Return the run's model config and its architecture."""
    run = add_parts(run)
    return run.model.config, load_checked(run, run.model.config)


def test_the_run_file_says_what_the_code_builds():
    run = add_parts(RUN)
    config = run.model.config
    assert config.parameters == (40 * 16 + 8 * 16 + 2 * 16, 2 * (12 * 16**2 + 13 * 16))
    assert loads(dumps(run)) == run
    for stage in range(3):
        module = build_stage(config, stage, 0, load_checked(run, config))
        shapes = [tuple(parameter.shape) for parameter in module.parameters()]
        assert shapes == [*named_shapes(config, stage).values()]
    names = [weight.name for weight in model_weights(config)]
    assert names[0] == "wte.weight"
    assert names[-1] == "ln_f.bias"
    assert len(set(names)) == len(names) == 4 + 4 * 12
    assert "layers.3.c_attn.weight" in named_shapes(config, 2)


def test_initial_weights_are_the_same_at_every_replica_and_of_each_layer_others():
    config, own = built(RUN)
    torch.manual_seed(1)
    stage = build_stage(config, 1, 7, own)
    expected = torch.rand(1)
    torch.manual_seed(1)
    assert torch.rand(1) == expected, "the global random state was used"
    again = build_stage(config, 1, 7, own)
    for (name, a), b in zip(stage.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b), name
    first, second = (layer.c_attn.weight for layer in stage.layers)
    assert not torch.equal(first, second)
    assert first.std().item() == pytest.approx(0.02, rel=0.2)
    assert stage.layers[0].ln_1.weight.eq(1).all()
    assert stage.layers[0].c_fc.bias.eq(0).all()
    assert not torch.equal(build_stage(config, 1, 8, own).layers[0].c_attn.weight, first)


def test_blocks_see_no_later_tokens_and_the_head_is_the_embedding():
    config, own = built(RUN)
    ends, *body = (build_stage(config, stage, 0, own) for stage in range(3))
    tokens = torch.arange(8).view(1, 8)

    def logits(tokens: torch.Tensor) -> torch.Tensor:
        x = ends.embed(tokens)
        for stage in body:
            x = stage(x)
        return ends.logits(x)

    before = logits(tokens)
    tokens[0, 7] = 39
    assert torch.equal(logits(tokens)[:, :7], before[:, :7])
    loss = ends.loss(ends.embed(tokens[:, :-1]), tokens[:, 1:])
    loss.backward()
    flat = StageOptimizer(ends, torch.device("cpu")).weights
    looked = copy_with(empty_stage(config, 0, own), 2 * flat)
    assert torch.equal(looked.ends.wte.weight, 2 * ends.ends.wte.weight)


def test_its_own_loss_is_taken(tmp_path, monkeypatch):
    code = GPT2.replace(
        "    def logits",
        "    def loss(self, x, targets):\n        return x.sum()\n\n    def logits",
    )
    config, own = built(written(tmp_path, code, monkeypatch))
    ends = build_stage(config, 0, 0, own)
    assert ends.loss(torch.ones(1, 2, 16), torch.zeros(1, 2, dtype=torch.int64)) == 32


def test_between_stages_it_is_float32_whatever_autocast_makes_of_a_block(tmp_path, monkeypatch):
    code = GPT2.replace("return Block(self.config)", "return nn.Linear(16, 16)")
    config, own = built(written(tmp_path, code, monkeypatch))
    body = build_stage(config, 1, 0, own)
    x = torch.ones(1, 2, 16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert body.layers[0](x).dtype == torch.bfloat16
        assert body(x).dtype == torch.float32


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("def build(", "def make(", "has no function build"),
        ("import torch\n", "import torhc\n", "No module named 'torhc': install it here"),
        ("import torch\n", "1 / 0\n", "can't be loaded: ZeroDivisionError: division by zero"),
        ("return GPT2(config)", "return config", "returns ModelConfig, which has no method ends"),
        ("return GPT2(config)", "return GPT2(None)", "build fails: AttributeError"),
        ("return Block(self.config)", "return 3", r"block 0 of own\d+:build: int is not a torch"),
        (
            "nn.Linear(config.dim, 4 * config.dim)",
            "nn.Linear(config.dim, 4 * config.dim, dtype=torch.float16)",
            "c_fc.weight is torch.float16; only torch.float32 is trained",
        ),
        (
            "return Block(self.config)",
            "return nn.Linear(16, 16, bias=layer < 2)",
            r"2 parameters are not 1 in block 0 and in block 2: give all blocks",
        ),
        (
            "return Block(self.config)",
            "return nn.Linear(16, 16 + layer)",
            r"weight \[16, 16\] is not weight \[17, 16\] in block 0 and in block 1",
        ),
        (
            "return x\n\n    def logits",
            "return x[0]\n\n    def logits",
            r"embed of .* returns \[2, 16\]",
        ),
        (
            "self.wte.weight)",
            "self.wte.weight[1:])",
            r"logits of .*39\] for 2 tokens instead of \[1, 2, 40",
        ),
        ("def logits", "def head", "have no method logits"),
        ("return Ends(self.config)", "return nn.ReLU()", "has no parameters"),
        ("x: Tensor = self.wte(", "assert tokens.sum() < 9; x: Tensor = self.wte(", "meta device"),
    ],
)
def test_what_is_no_architecture_is_refused_with_what_it_lacks(
    tmp_path, monkeypatch, old, new, says
):
    assert old in GPT2
    run = written(tmp_path, GPT2.replace(old, new), monkeypatch)
    with pytest.raises(OwnCodeError, match=says):
        add_parts(run)


def test_a_module_that_is_not_there_is_looked_for_where_it_is_said(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OwnCodeError, match=f"no module nowhere on this.*now {tmp_path}"):
        load_architecture(override(RUN, model__module="nowhere.at.all:build").model.config)


def test_a_node_has_the_code_that_the_run_was_begun_with(tmp_path, monkeypatch):
    run = add_parts(written(tmp_path, GPT2, monkeypatch))
    name = run.model.module
    assert name is not None
    other = override(run, model__parts={**run.model.parts.model_dump(), "source": "0" * 32})
    with pytest.raises(NodeError, match=f"model.module: {name} on this machine, .* differs from"):
        find_own_code(other, other.model.config)
    wider = override(run, model__dim=32)
    with pytest.raises(NodeError, match=r"another model than .*: wte.weight \[40, 16\] is not wte"):
        find_own_code(wider, wider.model.config)
    assert find_own_code(run, run.model.config) is not None
    assert find_own_code(RunFile(), RunFile().model.config) is None


def test_a_package_is_all_of_its_files(tmp_path, monkeypatch):
    folder = tmp_path / f"package{next(numbers)}"
    folder.mkdir()
    for file, text in (("__init__.py", ""), ("own.py", GPT2), ("other.py", "x = 1\n")):
        (folder / file).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    run = override(RUN, model__module=f"{folder.name}.own:build")
    _, before = load_architecture(run.model.config)
    (folder / "other.py").write_text("x = 2\n")
    assert load_architecture(run.model.config)[1] != before


def test_a_node_loads_no_code_because_a_registry_says_so():
    with pytest.raises(NodeError, match=r"start the node with --allow-module examples.gpt2:build$"):
        check_module(RUN, None)
    with pytest.raises(NodeError, match=r"\(and not --allow-module other:build\)$"):
        check_module(RUN, "other:build")
    check_module(RUN, "examples.gpt2:build")
    check_module(RunFile(), None)


def test_who_resolves_a_run_file_loads_neither_torch_nor_the_code(data):
    code = (
        "import sys; from planaria.node.launch.resolve import resolve\n"
        "from planaria.node.run_file import dumps, loads\n"
        "run = resolve(loads(sys.stdin.read()))\n"
        "assert not {'torch', 'numpy', 'examples.gpt2'} & set(sys.modules)\n"
        "print(dumps(run))"
    )
    given = dumps(override(RUN, data__path=str(data), model__vocabulary=512))
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=given,
        capture_output=True,
        cwd=ROOT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    parts = loads(done.stdout).model.parts
    assert parts is not None
    assert dict(parts.ends)["wte.weight"] == (512, 16)


def test_what_is_wrong_with_the_code_is_wrong_with_the_run_file(data, tmp_path, monkeypatch):
    run = written(tmp_path, "raise RuntimeError('not today')", monkeypatch)
    with pytest.raises(RunFileError, match=r"model.module: own.* RuntimeError: not today"):
        resolve(override(run, data__path=str(data), model__vocabulary=512))
    with pytest.raises(RunFileError, match="are two models: leave one out"):
        override(RUN, model__from="folder")


def test_it_is_exported_as_named_tensors_which_its_code_reads(tmp_path, monkeypatch):
    """The code in docs/own-architecture.md reads the exported tensors."""
    config, own = built(RUN)
    stages = [build_stage(config, stage, 0, own) for stage in range(3)]
    flat = [StageOptimizer(module, torch.device("cpu")).weights for module in stages]
    monkeypatch.chdir(tmp_path)
    out = Path("my-model")
    export(out, ModelParts(config, lambda of, first, n: flat[of][first : first + n]))
    page = (ROOT / "docs/own-architecture.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    read: dict[str, Any] = {}
    exec(code, read)
    tokens = torch.arange(8).view(1, 8)
    x = read["ends"].embed(tokens)
    for block in read["blocks"]:
        x = block(x)
    ends, *body = stages
    wanted = ends.logits(body[1](body[0](ends.embed(tokens))))
    assert torch.equal(read["ends"].logits(x), wanted)
    with pytest.raises(UnsupportedModelError, match="this model needs its own code, examples"):
        WholeModel.load(out, torch.device("cpu"))
