"""Each end of a link proves its identity with its hello."""

from __future__ import annotations

import pytest

from planaria.bootstrap.identity import Identity
from planaria.node.wire.greetings import ANSWER, DIAL, Greetings
from planaria.node.wire.session import DialRefused

A, B = Identity.generate(), Identity.generate()
HELLO = "1 0 1 0 0 0123456789abcdef"


def test_both_ends_prove_who_they_are() -> None:
    a, b = Greetings("run", "a", A), Greetings("run", "b", B)
    hello = a.sign(DIAL, "b", HELLO)
    assert b.verify(DIAL, "a", A.public, hello) == HELLO
    answer = b.sign(ANSWER, "a", HELLO, hello)
    assert a.verify(ANSWER, "b", B.public, answer, hello) == HELLO


@pytest.mark.parametrize(
    "hello",
    [
        Greetings("run", "a", B).sign(DIAL, "b", HELLO),
        Greetings("run", "a", A).sign(DIAL, "c", HELLO),
        Greetings("another", "a", A).sign(DIAL, "b", HELLO),
        Greetings("run", "b", A).sign(DIAL, "b", HELLO),
        Greetings("run", "a", A).sign(ANSWER, "b", HELLO, HELLO),
        "2" + Greetings("run", "a", A).sign(DIAL, "b", HELLO),
        Greetings("run", "a", A).sign(DIAL, "b", HELLO) + "0",
        HELLO,
        "",
        "\N{SNOWMAN} z",
        "x" * 100_000,
    ],
)
def test_a_hello_is_of_one_node_to_another_in_a_run(hello: str) -> None:
    with pytest.raises(DialRefused, match="in the name of a is not signed by the key that"):
        Greetings("run", "b", B).verify(DIAL, "a", A.public, hello)


def test_an_answer_is_to_what_was_said() -> None:
    a, b = Greetings("run", "a", A), Greetings("run", "b", B)
    answer = b.sign(ANSWER, "a", HELLO, a.sign(DIAL, "b", "another hello"))
    with pytest.raises(DialRefused, match="in the name of b"):
        a.verify(ANSWER, "b", B.public, answer, a.sign(DIAL, "b", HELLO))


def test_a_member_without_a_key_proves_nothing() -> None:
    with pytest.raises(DialRefused):
        Greetings("run", "b", B).verify(
            DIAL, "a", b"", Greetings("run", "a", A).sign(DIAL, "b", HELLO)
        )
