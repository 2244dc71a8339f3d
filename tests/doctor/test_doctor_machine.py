"""Which hosts are here, and whether SGLang is the one we know."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.doctor import machine
from outrider.doctor.machine import Machine, check_machine, check_sglang, look
from outrider.doctor.memory import Room
from outrider.engines.sglang.versions import contract

ROOM = Room(2**34, "memory", is_gpu=False)


def made_up(device="cpu", gpu=None, **versions):
    return Machine(versions, device, gpu, "CUDA 12.8" if gpu else None, ROOM)


def test_the_page_counts_the_names_of_the_contract():
    page = Path(__file__).parents[2] / "docs" / "tools" / "doctor.md"
    known = contract.CONTRACTS["0.5.11"]
    count = sum(map(len, (known.HOOKS, known.CALLS, known.FIELDS, known.ATTRIBUTES)))
    assert f"SGLang 0.5.11: {count} names are as the contract says" in page.read_text()


def test_this_machine():
    found = look()
    assert found.room.total > 2**28
    assert look(memory_gib=24).room.total == 24 * 2**30


@pytest.mark.parametrize(
    ("here", "level", "said"),
    [
        (made_up(), "warning", "torch is not installed"),
        (made_up(torch="2.9"), "warning", "neither Transformers nor SGLang"),
        (made_up(torch="2.9", transformers="5.6.0"), "ok", "in the range"),
        (made_up(torch="2.9", transformers="4.57.1"), "ok", "in the range"),
        (made_up(torch="2.9", transformers="4.56.2"), "warning", "outside of 4.57"),
        (made_up(torch="2.9", transformers="6.0.0"), "warning", "outside of 4.57"),
        (made_up("cuda", "H100", torch="2.9"), "warning", "Triton is not installed"),
        (made_up("cuda", "H100", torch="2.9", triton="3.5.0"), "note", "not run on one yet"),
    ],
)
def test_what_is_installed(here, level, said):
    found = [finding for finding in check_machine(here) if said in finding.what]
    assert [finding.level for finding in found] == [level]


def test_another_sglang_is_a_problem():
    (finding,) = check_sglang("0.5.12", "cuda")
    assert finding.level == "problem"
    assert "SGLang 0.5.12; Outrider knows 0.5.11 or 0.5.23" in finding.what
    assert finding.fix == "pip install sglang==0.5.23"


def test_a_changed_sglang_of_our_version_is_a_problem(monkeypatch):
    monkeypatch.setattr(contract, "differences", lambda known: ["a(b) was (c)"])
    (finding,) = check_sglang("0.5.11", "cuda")
    assert finding.level == "problem"
    assert "a(b) was (c)" in finding.what


def test_a_broken_sglang_is_a_problem(monkeypatch):
    def broken(known):
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr(contract, "differences", broken)
    (finding,) = check_sglang("0.5.11", "cuda")
    assert (finding.level, "torchvision::nms" in finding.what) == ("problem", True)


@pytest.mark.parametrize(("names", "allowed"), [([], ""), (["outrider"], "other, another")])
def test_a_plugin_that_sglang_does_not_load(monkeypatch, names, allowed):
    points = [type("Point", (), {"name": name}) for name in names]
    monkeypatch.setattr(contract, "differences", lambda known: [])
    monkeypatch.setattr(machine, "entry_points", lambda group: points)
    monkeypatch.setenv("SGLANG_PLUGINS", allowed)
    found = list(check_sglang("0.5.11", "cuda"))
    assert [finding.level for finding in found] == ["ok", "problem"]
