"""Texts that requests of a tenant share: who sees them, and how many there are."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace

import pytest

from outrider.core import Budget, KeyedCoins, Outcome
from outrider.drafters import SuffixDrafter
from outrider.drafters.lookup import SEPARATOR, Texts
from outrider.drafters.shared import LEAST, PARTS, SharedTexts

BUDGET = Budget((4,), "match", KeyedCoins())


def request(number, prompt, tenant=None):
    named = {} if tenant is None else {"tenant": tenant}
    return SimpleNamespace(id=number, prompt=tuple(prompt), output=[], **named)


def finish(drafter, made, output):
    drafter.start([made])
    rows = tuple(range(len(output)))
    drafter.observe([Outcome(made, tuple(output), rows, len(output), len(output), None)])
    drafter.stop([made])


def drafts(drafter, made):
    drafter.start([made])
    found = drafter.propose([made], BUDGET).tokens.tolist()
    drafter.stop([made])
    return found


def test_a_finished_output_is_found_by_the_same_tenant_alone():
    drafter = SuffixDrafter(shared_tokens=2048)
    finish(drafter, request(0, [50, 51, 52, 53], "a"), [1, 2, 3, 4, 5, 6])
    ask = [9, 1, 2, 3]
    assert drafts(drafter, request(1, ask, "a")) == [4, 5, 6]  # not beyond its end
    assert drafts(drafter, request(2, ask, "b")) == []
    assert drafts(drafter, request(3, ask)) == []
    assert drafts(drafter, request(4, [9, 50, 51, 52], "a")) == []  # a prompt is not shared
    assert drafts(drafter, request(5, [1, 2, 3, 8, 1, 2, 3], "a"))[0] == 8  # the own text first


def test_it_is_off_unless_asked_for():
    drafter = SuffixDrafter()
    finish(drafter, request(0, [0]), [1, 2, 3, 4, 5, 6])
    assert drafts(drafter, request(1, [9, 1, 2, 3])) == []
    assert drafter.nbytes == 0
    with pytest.raises(ValueError, match="shared_tokens"):
        SuffixDrafter(shared_tokens=10)


def test_tenants_never_meet():
    """They write with the same words; what follows tells whose text it is."""
    random, drafter = Random(0), SuffixDrafter(min_vote=0.0, shared_tokens=4096)
    tenants = {"": range(100, 200), "a": range(200, 300), "b": range(300, 400)}
    hits = 0
    for i in range(300):
        tenant = random.choice(list(tenants))
        words = [random.randrange(4) for _ in range(3)]
        found = drafts(drafter, request(2 * i, [9, *words], tenant))
        assert set(found) <= {*range(4), *tenants[tenant]}
        hits += len(found) > 0
        output = [t for _ in range(6) for t in (*words, random.choice(tenants[tenant]))]
        finish(drafter, request(2 * i + 1, [9], tenant), output)
    assert hits > 100


def test_tenants_hash_apart():
    shared = SharedTexts(4096, Texts())
    for tenant in ("a", "b"):
        shared.add(tenant, range(900))
    (a,), (b,) = shared.of("a"), shared.of("b")
    heads = shared.texts._arena.heads
    assert (heads[a] > 0).sum() > 500
    assert ((heads[a] == heads[b]) & (heads[a] > 0)).sum() < 20


def stored(shared, tenants):
    return {
        t: sum(shared.texts.lengths[row] for row in shared.of(t)) for t in tenants if shared.of(t)
    }


def test_the_oldest_go_first():
    shared = SharedTexts(PARTS * LEAST, Texts())
    for i in range(PARTS + 1):
        shared.add(f"tenant {i}", [1, 2, 3])  # each counts for LEAST
    tenants = [f"tenant {i}" for i in range(PARTS + 1)]
    assert list(stored(shared, tenants)) == tenants[1:]


def test_bounds():
    random, most = Random(0), 8000
    shared = SharedTexts(most, Texts())
    tenants = "abcde"
    for i in range(500):
        shared.add(random.choice(tenants), [i] * random.choice([0, 1, 50, 1000, 20_000]))
        held = stored(shared, tenants)
        assert sum(held.values()) <= most
        assert all(len(shared.of(tenant)) <= PARTS for tenant in tenants)
        # with some bytes for each of few chunks
        assert shared.nbytes <= 16 * most + 256 * most // LEAST
    assert sum(held.values()) > most // 2
    latest = shared.of(max(held, key=held.get))[0]
    assert shared.texts.tokens_from(latest, 0)[-1] == SEPARATOR
