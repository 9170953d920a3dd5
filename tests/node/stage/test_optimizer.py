from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from planaria.node.run_file import loads
from planaria.node.stage import optimizer
from planaria.node.stage.initial import InitialStages
from planaria.node.stage.optimizer import StageOptimizer, digest_of

CPU = torch.device("cpu")


def network(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 5), nn.Linear(5, 3, bias=False))


def backward(module: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    module(torch.randint(11, (4, 7), generator=generator)).square().sum().backward()


@pytest.mark.parametrize(("betas", "decay"), [((0.9, 0.999), 0.0), ((0.8, 0.95), 0.3)])
def test_updates_are_those_of_torch(betas: tuple[float, float], decay: float) -> None:
    mine, theirs = network(), network()
    ours = StageOptimizer(mine, CPU, betas, decay)
    adam = torch.optim.AdamW(
        [
            {"params": [p for p in theirs.parameters() if (p.dim() > 1) == decays]}
            | {"weight_decay": decay if decays else 0.0}
            for decays in (True, False)
        ],
        betas=betas,
        eps=1e-8,
    )
    for step in range(1, 31):
        lr, clip = 1e-2 / step, 1 / (1 + step % 3)
        for group in adam.param_groups:
            group["lr"] = lr
        ours.zero_gradient()
        adam.zero_grad()
        backward(mine, seed=step)
        backward(theirs, seed=step)
        for parameter in theirs.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(clip)
        ours.step(lr, clip_scale=clip)
        adam.step()
    wanted = torch.cat([p.detach().flatten() for p in theirs.parameters()])
    torch.testing.assert_close(ours.weights, wanted, rtol=0, atol=1e-6)
    assert ours.steps == 30


def test_parameters_and_gradients_are_views_and_stay_so() -> None:
    module = network()
    before = [p.detach().clone() for p in module.parameters()]
    stage = StageOptimizer(module, CPU)
    names = dict(module.named_parameters())
    offset = 0
    for (_, parameter), old in zip(names.items(), before, strict=True):
        assert torch.equal(parameter, old)
        assert parameter.data_ptr() == stage.weights[offset:].data_ptr()
        offset += parameter.numel()
    assert offset == len(stage.weights)

    backward(module, seed=1)
    once = stage.gradient.clone()
    assert once.abs().sum() > 0
    backward(module, seed=1)
    torch.testing.assert_close(stage.gradient, 2 * once)
    stage.step(0.1)
    stage.zero_gradient()
    offset = 0
    for parameter in names.values():
        assert parameter.grad is not None
        assert parameter.grad.data_ptr() == stage.gradient[offset:].data_ptr()
        assert not parameter.grad.any()
        assert parameter.data_ptr() == stage.weights[offset:].data_ptr()
        offset += parameter.numel()


def trained(threads: int) -> tuple[bytes, float, StageOptimizer]:
    module = nn.Linear(700, 700, bias=False)
    stage = StageOptimizer(module, CPU)
    generator = torch.Generator().manual_seed(4)
    stage.weights.normal_(generator=generator)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for _ in range(3):
            stage.gradient.normal_(generator=generator)
            stage.step(1e-3, clip_scale=0.7)
        return stage.digest(), stage.squared_norm(), stage
    finally:
        torch.set_num_threads(before)


def test_equal_gradients_give_equal_bits_whatever_the_threads() -> None:
    (a, a_norm, first), (b, b_norm, second) = trained(threads=1), trained(threads=3)
    assert a == b
    assert a_norm == b_norm
    for (_, x), (_, y) in zip(first.state(), second.state(), strict=True):
        assert torch.equal(x, y)


def test_blocks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, pieces = StageOptimizer(network(), CPU), StageOptimizer(network(), CPU)
    for stage, block in ((whole, optimizer.BLOCK), (pieces, 8)):
        monkeypatch.setattr(optimizer, "BLOCK", block)
        stage.gradient.copy_(torch.linspace(-3, 5, len(stage.gradient)))
        wanted = math.fsum(g**2 for g in stage.gradient.tolist())
        assert stage.squared_norm() == pytest.approx(wanted, rel=1e-14)
        stage.step(1e-2)
    assert whole.digest() == pieces.digest()


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_one_bad_element_makes_the_gradient_not_finite(value: float) -> None:
    stage = StageOptimizer(network(), CPU)
    assert stage.squared_norm() == 0.0
    stage.gradient.fill_(3e38)  # its square is beyond float32
    assert math.isfinite(stage.squared_norm())
    stage.gradient[-1] = value
    assert not math.isfinite(stage.squared_norm())


@given(
    size=st.sampled_from([1, 2047, 2048, 2049, 5000]),
    where=st.floats(0, 1, exclude_max=True),
    bit=st.integers(0, 31),
)
@settings(max_examples=50)
def test_digest_tells_any_bit_of_any_weight(size: int, where: float, bit: int) -> None:
    weights = torch.randn(size, generator=torch.Generator().manual_seed(size))
    before = digest_of(weights)
    assert digest_of(weights.clone()) == before
    bits = weights.view(torch.int32).numpy().view("uint32")
    bits[int(where * size)] ^= 1 << bit
    assert digest_of(weights) != before
    assert digest_of(torch.cat([weights, torch.zeros(1)])) != digest_of(weights), (
        "a zero more is another"
    )


@given(size=st.integers(1, 100), where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 31))
@settings(max_examples=50)
@pytest.mark.parametrize("name", ["first_moment", "second_moment"])
def test_in_eight_updates_the_digest_tells_any_bit_of_any_moment(
    name: str, size: int, where: float, bit: int
) -> None:
    """Each bit is covered by one of the eight digests."""
    a, b = (StageOptimizer(nn.Linear(size, 1, bias=False), CPU) for _ in "ab")
    b.load(a.state(), 0)
    bits = dict(b.state())[name].view(torch.int32).numpy().view("uint32")
    bits[int(where * size)] ^= 1 << bit
    noticed = 0
    for a.steps in range(optimizer.TURNS):
        b.steps = a.steps
        noticed += a.digest() != b.digest()
    assert noticed == 1


def test_digest_tells_how_many_updates_there_were() -> None:
    a, b = StageOptimizer(network(), CPU), StageOptimizer(network(), CPU)
    assert a.digest() == b.digest()
    assert len(a.digest()) == 16
    b.steps = optimizer.TURNS
    assert a.digest() != b.digest()


def test_a_copied_state_goes_on_alike() -> None:
    source, joiner = StageOptimizer(network(), CPU), StageOptimizer(network(seed=5), CPU)
    source.gradient.normal_(generator=torch.Generator().manual_seed(0))
    source.step(1e-2)
    joiner.load([(n, t.clone()) for n, t in source.state()], source.steps)
    for stage in (source, joiner):
        stage.gradient.fill_(0.5)
        stage.step(1e-2)
    assert source.digest() == joiner.digest()
    assert joiner.steps == 2


def test_weights_alone_start_adam_afresh() -> None:
    stage = StageOptimizer(network(), CPU)
    stage.gradient.fill_(1.0)
    stage.step(1e-2)
    weights = torch.full_like(stage.weights, 0.25)
    stage.load([("weights", weights)], steps=0)
    assert torch.equal(stage.weights, weights)
    assert stage.steps == 0
    assert not stage.first_moment.any()
    assert not stage.second_moment.any()


def test_states_that_do_not_fit_change_nothing() -> None:
    stage = StageOptimizer(network(), CPU)
    stage.gradient.fill_(1.0)
    stage.step(1e-2)
    before = [t.clone() for _, t in stage.state()]
    good = stage.state()
    count = len(stage.weights)
    for tensors, steps, message in (
        ([], 0, "not none"),
        (good[:2], 1, "not weights, first_moment"),
        ([("weight", good[0][1])], 0, "not weight$"),
        ([*good[:2], ("second_moment", torch.zeros(3))], 1, rf"\[3\].* needs .*\[{count}\]"),
        ([("weights", good[0][1].half())], 0, "weights is torch.float16"),
        (good[:1], 4, "steps = 4 doesn't fit a state of weights"),
        (good, -1, "steps = -1"),
    ):
        with pytest.raises(ValueError, match=message):
            stage.load(tensors, steps)
    assert stage.steps == 1
    for old, (_, tensor) in zip(before, stage.state(), strict=True):
        assert torch.equal(old, tensor)


# Muon


def test_matrices_move_as_by_torch_s_muon() -> None:
    """torch's Muon computes in bfloat16."""
    ours, theirs = nn.Linear(24, 40, bias=False), nn.Linear(24, 40, bias=False)
    theirs.load_state_dict(ours.state_dict())
    stage = StageOptimizer(ours, CPU, weight_decay=0.1, muon=10.0)
    muon = torch.optim.Muon(theirs.parameters(), lr=0.02, weight_decay=0.1, momentum=0.95)
    generator = torch.Generator().manual_seed(3)
    for _ in range(5):
        gradient = torch.randn(40, 24, generator=generator)
        stage.gradient.copy_(gradient.flatten())
        theirs.weight.grad = gradient
        stage.step(0.002)
        muon.step()
    moved = (ours.weight - theirs.weight).norm() / theirs.weight.norm()
    assert moved < 0.01


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 8, 5))
        self.norm = nn.Parameter(torch.ones(8))


def test_a_tensor_of_three_dimensions_is_a_batch_of_matrices_and_a_vector_moves_by_signs() -> None:
    generator = torch.Generator().manual_seed(4)
    gradients = torch.randn(3, 8, 5, generator=generator)
    together = Experts()
    stage = StageOptimizer(together, CPU, muon=2.0)
    vector = torch.randn(8, generator=generator)
    stage.gradient.copy_(torch.cat([gradients.flatten(), vector]))
    stage.step(0.1)
    for matrix, gradient in zip(together.weight, gradients, strict=True):
        alone = nn.Linear(5, 8, bias=False)
        nn.init.ones_(alone.weight)
        other = StageOptimizer(alone, CPU, muon=2.0)
        other.gradient.copy_(gradient.flatten())
        other.step(0.1)
        assert torch.equal(matrix, alone.weight)
    torch.testing.assert_close(together.norm.detach(), 1 - 0.03 * vector.sign())


def test_muon_has_one_moment_that_digest_and_state_cover() -> None:
    module = Experts()
    stage = StageOptimizer(module, CPU, muon=2.0)
    stage.gradient.fill_(1.0)
    stage.step(0.1)
    state = [(name, tensor.clone()) for name, tensor in stage.state()]
    assert [name for name, _ in state] == ["weights", "first_moment"]
    other = StageOptimizer(Experts(), CPU, muon=2.0)
    other.load(state, steps=1)
    assert other.digest() == stage.digest()
    other.first_moment[other.in_turn()] += 1
    assert other.digest() != stage.digest()
    with pytest.raises(ValueError, match="tensors weights, first_moment or weights alone"):
        stage.load([*state, ("second_moment", state[1][1])], steps=1)


def test_only_blocks_are_for_muon() -> None:
    run = loads('[training]\noptimizer = "muon"\nlr = 1e-3\nmuon_lr = 0.05')
    config = run.config_for(11)
    ends, body = (InitialStages(run, config).stage(stage) for stage in (0, 1))
    before = [p.detach().clone() for p in body.parameters()]
    optimizers = [StageOptimizer.of_run(stage, CPU, run) for stage in (ends, body)]
    sizes = [optimizer.state() for optimizer in optimizers]
    assert [len(tensors) for tensors in sizes] == [config.tensors_in(0), config.tensors_in(1)]
    optimizers[1].gradient.fill_(1.0)
    optimizers[1].step(0.5e-3)  # half of the peak
    for parameter, old in zip(body.parameters(), before, strict=True):
        if parameter.dim() == 1:
            torch.testing.assert_close(parameter.detach(), old - 1.5e-4, rtol=0, atol=1e-6)
        else:
            rows, columns = parameter.shape
            size = torch.linalg.matrix_norm(parameter - old, 2).item()
            scale = max(1.0, rows / columns) ** 0.5
            assert 0.6 < size / (0.025 * scale) < 1.25
