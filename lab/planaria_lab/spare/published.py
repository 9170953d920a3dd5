"""Tables 2 and 4 to 6 of the SPARe paper, as printed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Simulated:
    """A row of tables 4 to 6: failures before the first wipe-out and stacks a step, each from the
    closed form and from Monte Carlo."""

    failures_theory: float
    failures: float
    stacks_theory: float
    stacks: float


MONTE_CARLO: dict[tuple[int, int], Simulated] = {
    (200, 2): Simulated(12.5, 13.2, 1.84, 1.9),
    (200, 3): Simulated(30.5, 31.3, 1.93, 1.96),
    (200, 4): Simulated(48.2, 49.8, 1.97, 1.98),
    (200, 5): Simulated(63.6, 65.3, 1.96, 1.98),
    (200, 6): Simulated(76.7, 78.5, 1.97, 1.99),
    (200, 7): Simulated(87.8, 89.7, 1.97, 2.0),
    (200, 8): Simulated(97.1, 99.3, 1.99, 2.03),
    (200, 9): Simulated(105.1, 106.9, 2.03, 2.07),
    (200, 10): Simulated(112.0, 113.6, 2.09, 2.11),
    (200, 11): Simulated(118.0, 120.9, 2.14, 2.16),
    (200, 12): Simulated(123.2, 126.3, 2.17, 2.2),
    (600, 2): Simulated(21.7, 22.5, 1.89, 1.94),
    (600, 3): Simulated(63.5, 65.3, 1.97, 1.98),
    (600, 4): Simulated(109.9, 108.9, 1.97, 1.99),
    (600, 5): Simulated(153.3, 154.6, 1.99, 1.99),
    (600, 6): Simulated(191.7, 194.8, 1.99, 2.0),
    (600, 7): Simulated(225.1, 227.2, 2.0, 2.0),
    (600, 8): Simulated(254.0, 254.9, 1.99, 2.0),
    (600, 9): Simulated(279.1, 281.4, 2.0, 2.02),
    (600, 10): Simulated(301.1, 302.3, 2.0, 2.04),
    (600, 11): Simulated(320.4, 324.8, 2.05, 2.08),
    (600, 12): Simulated(337.4, 340.0, 2.1, 2.11),
    (600, 13): Simulated(352.5, 355.3, 2.14, 2.15),
    (600, 14): Simulated(366.1, 366.8, 2.17, 2.18),
    (600, 15): Simulated(378.2, 382.1, 2.2, 2.21),
    (600, 16): Simulated(389.2, 393.4, 2.22, 2.25),
    (600, 17): Simulated(399.2, 400.6, 2.24, 2.27),
    (600, 18): Simulated(408.3, 412.6, 2.28, 2.31),
    (600, 19): Simulated(416.6, 420.2, 2.31, 2.33),
    (600, 20): Simulated(424.2, 426.4, 2.34, 2.36),
    (1000, 2): Simulated(28.0, 28.6, 1.96, 1.95),
    (1000, 3): Simulated(89.3, 89.7, 1.98, 1.99),
    (1000, 4): Simulated(161.2, 163.2, 1.99, 1.99),
    (1000, 5): Simulated(230.6, 230.4, 1.99, 2.0),
    (1000, 6): Simulated(293.4, 296.3, 1.99, 2.0),
    (1000, 7): Simulated(348.7, 349.8, 1.99, 2.0),
    (1000, 8): Simulated(397.1, 399.3, 2.0, 2.0),
    (1000, 9): Simulated(439.5, 443.6, 2.0, 2.0),
    (1000, 10): Simulated(476.8, 477.2, 1.99, 2.02),
    (1000, 11): Simulated(509.7, 510.2, 2.01, 2.05),
    (1000, 12): Simulated(538.9, 543.0, 2.06, 2.08),
    (1000, 13): Simulated(564.9, 568.1, 2.11, 2.12),
    (1000, 14): Simulated(588.3, 592.3, 2.15, 2.15),
    (1000, 15): Simulated(609.3, 608.1, 2.17, 2.17),
    (1000, 16): Simulated(628.3, 633.1, 2.2, 2.21),
    (1000, 17): Simulated(645.6, 647.3, 2.22, 2.23),
    (1000, 18): Simulated(661.4, 663.7, 2.24, 2.26),
    (1000, 19): Simulated(675.9, 682.4, 2.27, 2.3),
    (1000, 20): Simulated(689.2, 691.6, 2.3, 2.32),
    (1000, 21): Simulated(701.5, 704.9, 2.33, 2.35),
    (1000, 22): Simulated(712.8, 714.4, 2.36, 2.37),
    (1000, 23): Simulated(723.3, 724.6, 2.38, 2.39),
    (1000, 24): Simulated(733.1, 736.2, 2.4, 2.42),
    (1000, 25): Simulated(742.2, 745.8, 2.42, 2.44),
    (1000, 26): Simulated(750.7, 751.9, 2.44, 2.46),
}
"""(groups, redundancy) -> row."""


@dataclass(frozen=True)
class PublishedScheme:
    """A row of table 2: the best result of a scheme."""

    days: float
    availability: float
    redundancy: int | None = None  # None: lost from the paper's text


REPLICATION = {
    200: PublishedScheme(6.07, 0.6174),
    600: PublishedScheme(4.27, 0.7989),
    1000: PublishedScheme(3.88, 0.8441),
}
SPARE = {
    200: PublishedScheme(2.92, 0.8700, 9),
    600: PublishedScheme(2.49, 0.9390, 8),
    1000: PublishedScheme(2.34, 0.9654, 9),
}
