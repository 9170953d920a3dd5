"""Placement of shard types on groups by cyclic Golomb rulers (SPARe, appendix B.1).

All differences between the marks of a Golomb ruler are distinct. If they are distinct modulo N too,
the ruler shifted to every i modulo N gives N sets of groups. No two sets share more than one group,
and no two groups host more than one common type. So types die almost independently.
"""

from __future__ import annotations

from itertools import count, permutations

import numpy as np
from numpy.typing import NDArray

_MARKS = (
    "0",
    "0 1",
    "0 1 3",
    "0 1 4 6",
    "0 1 4 9 11",
    "0 1 4 10 12 17",
    "0 1 4 10 18 23 25",
    "0 1 4 9 15 22 32 34",
    "0 1 5 12 25 27 35 41 44",
    "0 1 6 10 23 26 34 41 53 55",
    "0 1 4 13 28 33 47 54 64 70 72",
    "0 2 6 24 29 40 43 55 68 75 76 85",
    "0 2 5 25 37 43 59 70 85 89 98 99 106",
    "0 4 6 20 35 52 59 77 78 86 89 99 122 127",
    "0 4 20 30 57 59 62 76 100 111 123 136 144 145 151",
    "0 1 4 11 26 32 56 68 76 115 117 134 150 163 168 177",
    "0 5 7 17 52 56 67 80 81 100 122 138 159 165 168 191 199",
    "0 2 10 22 53 56 82 83 89 98 130 148 153 167 188 192 205 216",
    "0 1 6 25 32 72 100 108 120 130 153 169 187 190 204 231 233 242 246",
    "0 1 8 11 68 77 94 116 121 156 158 179 194 208 212 228 240 253 259 283",
    "0 2 24 56 77 82 83 95 129 144 179 186 195 255 265 285 293 296 310 329 333",
    "0 1 9 14 43 70 106 122 124 128 159 179 204 223 253 263 270 291 330 341 353 356",
    "0 3 7 17 61 66 91 99 114 159 171 199 200 226 235 246 277 316 329 348 350 366 372",
    "0 9 33 37 38 97 122 129 140 142 152 191 205 208 252 278 286 326 332 353 368 384 403 425",
    "0 12 29 39 72 91 146 157 160 161 166 191 207 214 258 290 316 354 372 394 396 431 459 467 480",
    "0 1 33 83 104 110 124 163 185 200 203 249 251 258 314 318 343 356 386 430 440 456 "
    "464 475 487 492",
    "0 3 15 41 66 95 97 106 142 152 220 221 225 242 295 330 338 354 382 388 402 415 486 "
    "504 523 546 553",
    "0 3 15 41 66 95 97 106 142 152 220 221 225 242 295 330 338 354 382 388 402 415 486 "
    "504 523 546 553 585",
)
OPTIMAL: dict[int, tuple[int, ...]] = {
    len(line.split()): tuple(map(int, line.split())) for line in _MARKS
}
"""Marks -> the shortest Golomb ruler with so many marks, 1 to 28. A ruler shorter than N/2 works
modulo N: a difference d and N - d cannot both be differences of its marks then."""


def is_golomb(marks: tuple[int, ...], modulus: int) -> bool:
    """Return whether all differences of two marks, in both directions, are distinct modulo this."""
    differences = {(a - b) % modulus for a, b in permutations(marks, 2)}
    return 0 not in differences and len(differences) == len(marks) * (len(marks) - 1)


def ruler(groups: int, redundancy: int) -> tuple[int, ...]:
    """Return a Golomb ruler of `redundancy` marks modulo `groups`.

    Raises ValueError if there is none. It names the smallest larger number of groups that works,
    and the largest redundancy that works for `groups`.
    """
    if groups < 1:
        raise ValueError(f"{groups} groups: at least one is needed")
    if redundancy not in OPTIMAL:
        raise ValueError(f"redundancy {redundancy}: rulers are known for 1 to {max(OPTIMAL)}")
    marks = OPTIMAL[redundancy]
    if not is_golomb(marks, groups):
        enough = next(n for n in count(groups) if is_golomb(marks, n))
        fewer = max(r for r in range(1, redundancy) if is_golomb(OPTIMAL[r], groups))
        raise ValueError(
            f"no ruler of {redundancy} marks has distinct differences modulo {groups}: redundancy "
            f"{redundancy} needs {enough} groups, and redundancy {fewer} works with {groups} groups"
        )
    return marks


def place(groups: int, redundancy: int) -> NDArray[np.int64]:
    """Return the groups that host each type: int64, (types, redundancy); as many types as groups.

    Each column is a rotation of the groups, so that in each stack every group computes another
    type. In the first column, group i hosts type i. Raises ValueError as `ruler` does.
    """
    marks = np.array(ruler(groups, redundancy), dtype=np.int64)
    hosts: NDArray[np.int64] = (np.arange(groups)[:, None] + marks) % groups
    return hosts
