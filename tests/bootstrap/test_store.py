"""Tests of registries that share views and decisions in etcd: who leads, and what is written."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from planaria.bootstrap.admission import Admission, AdmissionError
from planaria.bootstrap.authority import Authority, Role
from planaria.bootstrap.etcd import EtcdAway
from planaria.bootstrap.identity import Identity
from planaria.bootstrap.registry_pb2 import View
from planaria.bootstrap.store import LEASE, NotLeading, Store, StoreError
from planaria.bootstrap.views import sign
from tests.bootstrap.conftest import KEY
from tests.bootstrap.fake_etcd import FakeEtcd, Fate, Link


def store(etcd: FakeEtcd, at: str = "a:1", link: Link | None = None, key: Identity = KEY) -> Store:
    return Store(link or etcd.link(), "r", key, at, lambda: etcd.now)


def leading(etcd: FakeEtcd) -> Store:
    first = store(etcd)
    assert first.campaign()
    return first


@pytest.fixture
def etcd() -> FakeEtcd:
    return FakeEtcd()


def after(former: View | None, reason: str = "", skipping: int = 0) -> View:
    former = former or View()
    view = View(run="r", number=former.number + 1 + skipping, reason=reason)
    sign(view, KEY, former)
    return view


def numbers(etcd: FakeEtcd) -> list[int]:
    return [int(value) for key, value in etcd.history if key == "planaria/r/number"]


def test_one_leads_and_another_goes_on_from_its_view_when_it_is_gone(etcd: FakeEtcd) -> None:
    first, second = store(etcd, "a:1"), store(etcd, "b:1")
    assert first.leader() == "" and first.campaign()
    first.append(after(None))
    first.append(after(first.view, skipping=7))
    assert not second.campaign() and second.leader() == "a:1"
    etcd.passes(LEASE)
    assert not first.leads and second.leader() == ""
    assert second.campaign()
    assert second.view is not None and second.view == first.view and second.view.number == 9
    second.append(after(second.view))
    assert numbers(etcd) == [1, 9, 10]


def test_who_leads_goes_on_while_etcd_hears_it(etcd: FakeEtcd) -> None:
    first = leading(etcd)
    for _ in range(9):
        etcd.passes(LEASE * 0.9)
        first.renew()
        assert first.leads
    etcd.passes(LEASE)
    assert not first.leads
    first.renew()
    assert not first.leads


def test_who_resigns_makes_room_at_once(etcd: FakeEtcd) -> None:
    first, second = leading(etcd), store(etcd)
    first.resign()
    assert not first.leads and second.campaign()
    with pytest.raises(NotLeading, match="its lease has expired"):
        first.append(after(None))
    assert second.leads and not numbers(etcd)


def test_what_cannot_be_written_ends_the_term(etcd: FakeEtcd) -> None:
    fates = [Fate.ANSWERED] * 3
    first = store(etcd, link=etcd.link(lambda: fates.pop(0) if fates else Fate.LOST))
    assert first.campaign()
    with pytest.raises(NotLeading, match="can't be written: etcd doesn't answer"):
        first.append(after(None))
    assert not first.leads and first.view is None


def test_a_write_of_a_former_term_that_comes_late_is_not_done(etcd: FakeEtcd) -> None:
    fates = [Fate.ANSWERED] * 3 + [Fate.LATE]
    first = store(etcd, link=etcd.link(lambda: fates.pop(0) if fates else Fate.LOST))
    first.campaign()
    with pytest.raises(NotLeading):
        first.append(after(None, "the first one's"))
    etcd.passes(LEASE)
    second = store(etcd)
    second.campaign()
    etcd.catch_up()
    assert not numbers(etcd)
    second.append(after(None, "the second one's"))
    assert numbers(etcd) == [1]


def test_a_write_that_was_done_at_an_attempt_without_answer_counts(etcd: FakeEtcd) -> None:
    """etcd.py asks etcd's next node if one doesn't answer, so that a request may be done twice."""

    class Twice(Link):
        def ask(self, path, body, seconds):
            if path == "kv/txn":
                etcd.do(path, body)
            return super().ask(path, body, seconds)

    first = leading(etcd)
    first._etcd = Twice(etcd, lambda: Fate.ANSWERED)
    first.append(after(None))
    first.append(after(first.view))
    first.decide({"banned": "b" * 32})
    assert numbers(etcd) == [1, 2] and first.leads


def test_a_view_that_goes_back_is_not_written(etcd: FakeEtcd) -> None:
    first = leading(etcd)
    first.append(after(None, skipping=4))
    with pytest.raises(NotLeading, match="view 1 is not newer than view 5"):
        first.append(after(None))


def test_what_somebody_else_has_written_is_not_written_over(etcd: FakeEtcd) -> None:
    first = leading(etcd)
    etcd.values["planaria/r/number"] = b"9"
    with pytest.raises(NotLeading, match="etcd has newer data"):
        first.append(after(None, skipping=20))
    assert not first.leads and not numbers(etcd)


def test_registries_with_different_keys_refuse_each_other(etcd: FakeEtcd) -> None:
    first, stranger = leading(etcd), store(etcd, key=Authority.make(0).identity)
    with pytest.raises(StoreError, match="the leader at a:1 has another key than this registry"):
        stranger.leader()
    first.append(after(None))
    first.resign()
    with pytest.raises(StoreError, match="view 1 in etcd is not signed by this registry's key"):
        stranger.campaign()
    assert first.leader() == ""  # it doesn't lead


@pytest.mark.parametrize(
    ("key", "value"), [("view", b"\xff"), ("number", b"2"), ("number", b"x"), ("leader", b"[]")]
)
def test_what_no_registry_has_written_is_refused(etcd: FakeEtcd, key: str, value: bytes) -> None:
    first = leading(etcd)
    first.append(after(None))
    first.resign()
    etcd.values[f"planaria/r/{key}"] = value
    with pytest.raises(StoreError, match="is invalid"):
        first.leader()
        first.campaign()


def test_the_next_one_knows_who_is_invited_and_banned_and_no_secret_lies_in_etcd(
    etcd: FakeEtcd,
) -> None:
    first, second = leading(etcd), store(etcd)
    admission = Admission(None, decided=first)
    invite, secret = admission.invite(Role.NODE, uses=2)
    admission.decide(admission.invites.ban("b" * 32))
    first.resign()
    with pytest.raises(
        AdmissionError, match="this registry can't store decisions: its lease has expired"
    ):
        admission.decide(admission.invites.ban("c" * 32))
    assert admission.invites.banned == {"b" * 32}
    second.campaign()
    again = Admission(None, decided=second)
    assert again.invites.invites == {invite.id: invite}
    assert again.invites.is_open(secret, 0) and again.invites.banned == {"b" * 32}
    again.decide(again.invites.revoke(invite.id))
    kept = b"".join(value for _, value in etcd.history)
    assert secret not in kept and secret.hex().encode() not in kept
    assert KEY.to_pem() not in kept


class Registries(RuleBasedStateMachine):
    """Two registries of a run, on links to etcd that lose and delay requests or lose answers."""

    def __init__(self) -> None:
        super().__init__()
        self.etcd = FakeEtcd()
        self.fates: list[Fate] = []
        links = [self.etcd.link(self.fate) for _ in range(2)]
        self.stores = [store(self.etcd, f"{n}:1", link) for n, link in enumerate(links)]
        self.shown: dict[int, bytes] = {}

    def fate(self) -> Fate:
        return self.fates.pop(0) if self.fates else Fate.ANSWERED

    @rule(which=st.integers(0, 1), fates=st.lists(st.sampled_from(Fate), max_size=3))
    def campaigns(self, which: int, fates: list[Fate]) -> None:
        if self.stores[which].leads:
            return
        self.fates = fates
        try:
            self.stores[which].campaign()
        except EtcdAway:
            assert not self.stores[which].leads

    @rule(which=st.integers(0, 1), fate=st.sampled_from(Fate))
    def renews(self, which: int, fate: Fate) -> None:
        self.fates = [fate]
        self.stores[which].renew()

    @rule(which=st.integers(0, 1), fate=st.sampled_from(Fate), reason=st.sampled_from("xyz"))
    def issues(self, which: int, fate: Fate, reason: str) -> None:
        """Issue a view, also by a registry that doesn't know that its lease is over."""
        self.fates, store = [fate], self.stores[which]
        view = after(store.view, f"{which}{reason}")
        try:
            store.append(view)
        except NotLeading:
            return
        assert store.leads
        assert self.shown.setdefault(view.number, view.SerializeToString()) == (
            view.SerializeToString()
        )

    @rule(which=st.integers(0, 1))
    def resigns(self, which: int) -> None:
        self.fates = []
        self.stores[which].resign()

    @rule(seconds=st.sampled_from([0.1, 1.0, LEASE / 2, float(LEASE)]))
    def time_passes(self, seconds: float) -> None:
        self.etcd.passes(seconds)

    @rule()
    def what_was_late_comes(self) -> None:
        self.etcd.catch_up()

    @invariant()
    def one_leads_at_most(self) -> None:
        assert sum(store.leads for store in self.stores) <= 1

    @invariant()
    def views_are_in_order_and_all_that_were_told_are_there(self) -> None:
        assert all(a < b for a, b in pairwise(numbers(self.etcd)))
        views = [value for key, value in self.etcd.history if key == "planaria/r/view"]
        assert set(self.shown.values()) <= set(views)


Registries.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestRegistries = Registries.TestCase
