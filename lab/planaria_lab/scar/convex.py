"""Costs of perturbations in convex problems with a known optimum, beside SCAR's bound on them.

The problems are a quadratic and multinomial logistic regression. The bound is Theorem 3.2 of SCAR
(Qiao et al., Fault Tolerance in Iterative-Convergent Machine Learning). The figures are 3, 5 and 6
of that paper. The trials of a figure are computed together, as rows of one array.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Update = Callable[[Floats], Floats]  # points [trials, ...] -> the same, an iteration later
Measure = Callable[[Floats], Floats]  # points [trials, ...] -> errors [trials]

# Iteration cost and its bound


def iterations_until(
    update: Update,
    error: Measure,
    points: Floats,
    tolerance: float,
    perturbations: Mapping[int, Floats],
    limit: int = 20_000,
) -> Ints:
    """Return the least K [trials]: error(y(k)) < tolerance for all k >= K (section 3.1's kappa).

    `perturbations`: iteration k -> delta_k [trials, ...]. They enter SCAR's equation 2,
    y(k+1) = f(y(k) + delta_k), where f is `update` and y(0) is `points`. After the last
    perturbation the error must never rise. Raises ValueError for trials that need more than `limit`
    iterations.
    """
    result = np.zeros(len(points), dtype=np.int64)
    running = np.arange(len(points))
    last = max(perturbations, default=-1)
    for k in range(limit):
        above = error(points) >= tolerance
        result[running[above]] = k + 1
        if k > last:
            running, points = running[above], points[above]
            if not len(running):
                return result
        if k in perturbations:
            points = points + perturbations[k]
        points = update(points)
    raise ValueError(f"{len(running)} trials are not within {tolerance:.3g} at iteration {limit}")


def time_discounted(norms: Mapping[int, Floats], c: float) -> Floats:
    """Return Delta_T (Theorem 3.2): sum of c^-k ||delta_k||. `norms`: k -> ||delta_k|| [trials]."""
    return np.asarray(sum(norm / c**k for k, norm in norms.items()))


def iteration_cost_bound(discounted: Floats, distance: float, c: float) -> Floats:
    """Return the most iterations that perturbations can cost (Theorem 3.2).

    `discounted`: Delta_T [trials]; `distance`: ||x(0) - x*||; `c`: the rate of linear convergence.
    """
    return np.log1p(discounted / distance) / math.log(1 / c)


def iterations_bound(discounted: Floats, distance: float, c: float, tolerance: float) -> Floats:
    """Return the most iterations that a perturbed run can need (kappa(y), proof of Theorem 3.2)."""
    return np.log((distance + discounted) / tolerance) / math.log(1 / c)


class Rates(NamedTuple):
    """Three estimates of c in Theorem 3.2, in ascending order."""

    mean: float  # of the unperturbed run, until it is within epsilon
    largest: float  # of any iteration of the unperturbed run
    exact: float  # the smallest with which (5) holds at every point


def rates(errors: Floats, exact: float) -> Rates:
    """Return a run's rates. `errors`: ||x(k) - x*|| > 0 for k = 0..K of the unperturbed run."""
    steps = len(errors) - 1
    return Rates(
        mean=float((errors[-1] / errors[0]) ** (1 / steps)),
        largest=float((errors[1:] / errors[:-1]).max()),
        exact=exact,
    )


def log_uniform(rng: np.random.Generator, low: float, high: float, count: int) -> Floats:
    return np.asarray(np.exp(rng.uniform(math.log(low), math.log(high), count)))


def random_perturbations(rng: np.random.Generator, sizes: Floats, shape: tuple[int, ...]) -> Floats:
    """Draw normal perturbations, float64 [trials, *shape], with expected squared norm sizes**2."""
    axes = tuple(range(1, 1 + len(shape)))
    return rng.normal(size=(len(sizes), *shape)) * np.expand_dims(
        sizes / math.sqrt(math.prod(shape)), axes
    )


# Figure 3: gradient descent on a quadratic


class Quadratic(NamedTuple):
    """The problem of minimising the sum of eigenvalue * x**2 / 2 from `start`. Its optimum is 0.

    The Hessian is diagonal: a rotation changes nothing for gradient descent and normal noise.
    """

    eigenvalues: Floats  # [dimensions], above 0
    start: Floats  # [dimensions]

    @property
    def exact_rate(self) -> float:
        """The exact c of gradient descent with step size 1 / the largest eigenvalue."""
        return float(1 - self.eigenvalues.min() / self.eigenvalues.max())

    def update(self, points: Floats) -> Floats:
        return np.asarray(points * (1 - self.eigenvalues / self.eigenvalues.max()))


def norm(points: Floats) -> Floats:
    """Return Euclidean norms [trials] of points [trials, ...]."""
    return np.asarray(np.linalg.norm(points.reshape(len(points), -1), axis=1))


class Trials(NamedTuple):
    """Perturbed runs of one problem, and its unperturbed run."""

    norms: Mapping[int, Floats]  # iteration k -> ||delta_k|| [trials]
    iterations: Ints  # [trials], until the error stays below the tolerance
    unperturbed: int  # the same, without perturbations
    distance: float  # ||x(0) - x*||
    tolerance: float
    rates: Rates


QUADRATIC_ITERATIONS: Final = 1_000
QUADRATIC_PERTURBED_AT: Final = 500


def quadratic_trials(kind: Literal["one", "any"], problem: int, trials: int) -> Trials:
    """Run the trials of Figure 3 on a quadratic with 4 dimensions and condition number 100.

    `one` perturbs at iteration 500 (a, b); `any` perturbs at each iteration with p = 0.001 (c).
    `problem` seeds the start and the perturbations. The sizes of these are log-uniform within
    0.05 .. 20 times the distance to the optimum at iteration 500.
    """
    rng = np.random.default_rng([3, problem])
    quadratic = Quadratic(np.geomspace(0.01, 1, 4), rng.normal(size=4))
    path = [quadratic.start]
    for _ in range(QUADRATIC_ITERATIONS):
        path.append(quadratic.update(path[-1]))
    errors = norm(np.array(path))
    tolerance = float(np.sqrt(errors[-1] * errors[-2]))  # passed between iterations 999 and 1,000
    distance_left = errors[QUADRATIC_PERTURBED_AT]

    def perturbation(hit: NDArray[np.bool_]) -> Floats:
        sizes = log_uniform(rng, 0.05 * distance_left, 20 * distance_left, trials) * hit
        return random_perturbations(rng, sizes, (4,))

    if kind == "one":
        perturbations = {QUADRATIC_PERTURBED_AT: perturbation(np.ones(trials, dtype=bool))}
    else:
        hits = {k: rng.random(trials) < 0.001 for k in range(QUADRATIC_ITERATIONS)}
        perturbations = {k: perturbation(hit) for k, hit in hits.items() if hit.any()}
    start = np.broadcast_to(quadratic.start, (trials, 4))
    return Trials(
        norms={k: norm(deltas) for k, deltas in perturbations.items()},
        iterations=iterations_until(quadratic.update, norm, start, tolerance, perturbations),
        unperturbed=int(iterations_until(quadratic.update, norm, start[:1], tolerance, {})[0]),
        distance=float(errors[0]),
        tolerance=tolerance,
        rates=rates(errors, quadratic.exact_rate),
    )


# Multinomial logistic regression on scikit-learn's digits


class Digits(NamedTuple):
    """The images of scikit-learn's digits, with their labels."""

    pixels: Floats  # [samples, rows], within 0..1; each pixel has a row of the weights [rows, 10]
    labels: Ints  # [samples], 0..9


CLASSES: Final = 10


def digits(margin: int = 0) -> Digits:
    """Return scikit-learn's 1,797 images, 8 by 8, with `margin` black columns on each side.

    Raises ModuleNotFoundError without scikit-learn, which is in planaria's extra `lab`.
    """
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    images = np.pad(pixels.reshape(-1, 8, 8) / 16, ((0, 0), (0, 0), (margin, margin)))
    return Digits(images.reshape(len(images), -1), labels.astype(np.int64))


def untrained(data: Digits) -> Floats:
    """Return the weights [rows, 10] before training: zeros."""
    return np.zeros((data.pixels.shape[1], CLASSES))


def cross_entropy(data: Digits, weights: Floats) -> Floats:
    """Return the mean cross-entropy [trials] over all samples, of weights [trials, rows, 10]."""
    # One wide product: many products with 10 columns take twice as long.
    logits = data.pixels @ weights.transpose(1, 0, 2).reshape(weights.shape[1], -1)
    logits = logits.reshape(len(data.pixels), len(weights), CLASSES)
    logits -= logits.max(axis=2, keepdims=True)
    right = logits[np.arange(len(data.labels)), :, data.labels]
    return np.asarray((np.log(np.exp(logits, out=logits).sum(axis=2)) - right).mean(axis=0))


def gradient(pixels: Floats, labels: Ints, weights: Floats) -> Floats:
    """Return the gradient of the mean cross-entropy, [trials, rows, 10].

    `pixels` [samples, rows] and `labels` [samples] are common to all trials, or each trial has its
    own: [trials, samples, rows] and [trials, samples].
    """
    logits = pixels @ weights
    logits -= logits.max(axis=2, keepdims=True)
    slopes = np.exp(logits, out=logits)
    slopes /= slopes.sum(axis=2, keepdims=True)
    slopes -= np.eye(CLASSES)[labels]
    return np.asarray(np.swapaxes(pixels, -1, -2) @ slopes / pixels.shape[-2])


# Figures 5 and 6: perturbations of three kinds, and the bound

DECAY: Final = 0.03  # makes the loss strongly convex: it has one optimum, and (5) holds
STEP_SIZE: Final = 0.35  # below 2 / (the largest curvature anywhere, 5.3, + DECAY), as (5) needs
REGRESSION_ITERATIONS: Final = 100
REGRESSION_PERTURBED_AT: Final = 50

Kind = Literal["random", "adversarial", "reset"]


def regularised_update(data: Digits, weights: Floats) -> Floats:
    """Return the weights after one step of gradient descent on `regularised_loss`."""
    slope = gradient(data.pixels, data.labels, weights) + DECAY * weights
    return weights - STEP_SIZE * slope


def regularised_loss(data: Digits, weights: Floats) -> Floats:
    """Return the mean cross-entropy over all samples + DECAY * ||weights||**2 / 2, [trials]."""
    return cross_entropy(data, weights) + DECAY / 2 * norm(weights) ** 2


def optimum(data: Digits) -> Floats:
    """Return the weights [rows, 10] of the smallest regularised loss, by Newton's method.

    Raises ArithmeticError if the slope isn't below 1e-12 within 30 iterations.
    """
    weights = untrained(data)[None]
    for _ in range(30):
        slope = gradient(data.pixels, data.labels, weights) + DECAY * weights
        if np.abs(slope).max() < 1e-12:
            return np.asarray(weights[0])
        weights = weights - np.linalg.solve(hessian(data, weights[0]), slope.ravel()).reshape(
            weights.shape
        )
    raise ArithmeticError(
        f"Newton's method has a slope of {np.abs(slope).max():.1e} after 30 iterations"
    )


def hessian(data: Digits, weights: Floats) -> Floats:
    """Return the Hessian of the regularised loss, [10 * rows, 10 * rows]; weights are raveled."""
    exponents = data.pixels @ weights
    likely = np.exp(exponents - exponents.max(axis=1, keepdims=True))
    likely /= likely.sum(axis=1, keepdims=True)
    result = DECAY * np.eye(weights.size)
    for a in range(CLASSES):
        for b in range(CLASSES):
            curvature = likely[:, a] * ((a == b) - likely[:, b]) / len(likely)
            result[a::CLASSES, b::CLASSES] += (data.pixels * curvature[:, None]).T @ data.pixels
    return result


def perturbations_of(kind: Kind, trials: int, at: Floats, best: Floats) -> Floats:
    """Draw perturbations, float64 [trials, rows, 10], of the weights `at` [rows, 10] (section 5.2).

    `random`: normal; `adversarial`: away from the optimum `best`. The sizes of both are log-uniform
    within 0.05 .. 5 times the distance to it. `reset`: sets a random fraction of the rows to 0,
    their first value.
    """
    rng = np.random.default_rng([5, ["random", "adversarial", "reset"].index(kind)])
    away = at - best
    distance_left = float(np.linalg.norm(away))
    match kind:
        case "random":
            sizes = log_uniform(rng, 0.05 * distance_left, 5 * distance_left, trials)
            return random_perturbations(rng, sizes, at.shape)
        case "adversarial":
            sizes = log_uniform(rng, 0.05 * distance_left, 5 * distance_left, trials)
            return sizes[:, None, None] * away / distance_left
        case "reset":
            lost = rng.random((trials, len(at))) < rng.uniform(0, 1, (trials, 1))
            return -at * lost[:, :, None]


def regression_trials(trials: int) -> Iterator[tuple[Kind, str, Trials]]:
    """Yield kind, criterion and trials, for each kind of perturbation and both criteria.

    A trial ends when its distance to the optimum, or its loss, is as small as that of the
    unperturbed run at iteration 100.
    """
    data = digits()
    best = optimum(data)
    path = [untrained(data)[None]]
    for _ in range(REGRESSION_ITERATIONS):
        path.append(regularised_update(data, path[-1]))
    errors = np.array([np.linalg.norm(weights - best) for weights in path])
    at = path[REGRESSION_PERTURBED_AT]
    measures: dict[str, Measure] = {
        "distance": lambda weights: norm(weights - best),
        "loss": lambda weights: regularised_loss(data, weights),
    }
    kinds: tuple[Kind, ...] = ("random", "adversarial", "reset")
    for kind in kinds:
        deltas = perturbations_of(kind, trials, at[0], best)
        for criterion, measure in measures.items():
            tolerance = float(np.mean([measure(path[-1]), measure(path[-2])]))
            rest = iterations_until(
                lambda weights: regularised_update(data, weights),
                measure,
                regularised_update(data, at + deltas),
                tolerance,
                {},
            )
            yield (
                kind,
                criterion,
                Trials(
                    norms={REGRESSION_PERTURBED_AT: norm(deltas)},
                    iterations=REGRESSION_PERTURBED_AT + 1 + rest,
                    unperturbed=REGRESSION_ITERATIONS,
                    distance=float(errors[0]),
                    tolerance=tolerance,
                    # Rows of pixels that are always black only decay; none shrinks less.
                    rates=rates(errors, 1 - STEP_SIZE * DECAY),
                ),
            )
