"""`outrider selftest`: in the interpreter, with a planted fault, and with a made-up GPU.

Each run is a process of its own: the interpreter must be chosen before Triton is imported.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from html import escape
from pathlib import Path

import pytest

pytest.importorskip("triton")
SRC = Path(__file__).parents[2] / "src" / "outrider"


def python(*args, **more):
    kept = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "COLUMNS")}
    environment = kept | {"OMP_NUM_THREADS": "1", "NO_COLOR": "1"} | more
    return subprocess.run(
        [sys.executable, *map(str, args)],
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip


def script(code, *args):
    return python("-c", textwrap.dedent(code), *args, TRITON_INTERPRET="1")


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """A real run on this machine's CPU, and its directory."""
    out = tmp_path_factory.mktemp("selftest") / "deep" / "er"
    done = python("-m", "outrider", "selftest", "--device", "cpu", "--quick", "--out", out)
    return done, out


def test_the_kernels_pass_in_the_interpreter(quick):
    done, out = quick
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"Passed: all \d+ checks", done.stdout)
    assert "no timings" in done.stdout
    found = json.loads((out / "selftest.json").read_text())
    assert found["passed"]
    assert found["measurements"] == []
    assert found["environment"]["triton"]
    assert {"date", "argv", "commit", "versions", "machine"} <= set(found["provenance"])
    assert {check["section"] for check in found["checks"]} == {"correctness", "bitwise"}
    assert all(check["passed"] and check["detail"] for check in found["checks"])


def test_every_kernel_is_checked(quick):
    """A new folder with a triton.py must be added to the selftest."""
    kernels = {file.parent.name for file in (SRC / "kernels").glob("*/triton.py")}
    found = json.loads((quick[1] / "selftest.json").read_text())
    checked = {c["name"].split(":")[0] for c in found["checks"] if c["section"] == "correctness"}
    assert checked == kernels
    bitwise = {c["name"].split(":")[0] for c in found["checks"] if c["section"] == "bitwise"}
    assert bitwise == {"paged_attention", "prefill_attention", "row_invariant"}


def test_the_page_says_that_there_are_no_timings(quick):
    page = (quick[1] / "selftest.html").read_text()
    assert "Passed: all" in page
    assert "no timings: this run used Triton's interpreter on CPU" in page
    assert "prefers-color-scheme: dark" in page
    assert "<svg" not in page
    # self-contained: nothing is loaded from anywhere
    assert not re.search(r"<(script|link|img)|https?://|@import|url\(", page)


FAULTS = {
    # a kernel that is right to rounding, and whose rows depend on how many there are
    "row_invariant: linear": """
        from outrider.kernels.row_invariant import triton
        def linear(x, weight, bias=None, true=triton.linear):
            return true(x, weight, bias) * (1 + 2**-8 * (len(x) == 63))
        triton.linear = linear
    """,
    "ngram_match": """
        from outrider.kernels.ngram_match import triton
        def ngram_match(true=triton.ngram_match, **given):
            drafts, counts = true(**given)
            return drafts + (drafts == 3), counts
        triton.ngram_match = ngram_match
    """,
    "tree_sampling": """
        from outrider.kernels.tree_sampling import triton
        def broken(**given):
            raise RuntimeError("no such instruction")
        triton.tree_speculative_sampling_target_only = broken
    """,
}


# to spare time; sample_match is sound
FEWER = """
    from outrider.selftest import checks
    kernels = ("row_invariant", "ngram_match", "tree_sampling", "sample_match")
    checks.KERNELS = {name: checks.KERNELS[name] for name in kernels}
    del checks.BITWISE["attention"]
"""


def test_a_planted_fault_is_named(tmp_path):
    """Three kernels are broken: the exit code is 1, each is named, and no other one fails."""
    done = script(
        "import sys\n"
        + "".join(textwrap.dedent(fault) for fault in FAULTS.values())
        + textwrap.dedent(FEWER)
        + "from outrider.cli.main import app\n"
        + "app(['selftest', '--device', 'cpu', '--quick', '--json', '--out', sys.argv[1]])\n",
        tmp_path,
    )
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert found == json.loads((tmp_path / "selftest.json").read_text())
    assert not found["passed"]
    wrong = {check["name"]: check for check in found["checks"] if not check["passed"]}
    for kernel in FAULTS:
        assert any(name.startswith(kernel) for name in wrong)
    assert all(name.startswith(tuple(FAULTS)) for name in wrong)
    linear = [check for name, check in wrong.items() if name.startswith("row_invariant")]
    assert [check["section"] for check in linear] == ["bitwise"]
    assert "M = 63" in linear[0]["detail"]
    assert any("no such instruction" in check["detail"] for check in wrong.values())
    page = (tmp_path / "selftest.html").read_text()
    assert f"Failed: {len(wrong)} of" in page
    assert all(escape(name) in page for name in wrong)


def test_cuda_without_a_gpu(tmp_path):
    done = python("-m", "outrider", "selftest", "--device", "cuda", "--out", tmp_path / "new",
                  CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="")  # fmt: skip
    assert done.returncode == 3
    assert "sees no GPU" in done.stderr
    assert "--device cpu" in done.stderr
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("package", "fix"), [("torch", "pip install torch"), ("triton", "outrider[selftest]")]
)
def test_without_what_it_needs(package, fix):
    code = f"""
        import sys
        sys.modules["{package}"] = None
        from outrider.cli.main import app
        app(["selftest", "--device", "cpu"])
    """
    done = python("-c", textwrap.dedent(code))
    assert done.returncode == 3
    assert f"{package} is not installed here" in done.stderr
    assert fix in done.stderr


def test_triton_was_imported_too_early():
    code = "import triton; from outrider.cli.main import app; app(['selftest', '--device', 'cpu'])"
    done = python("-c", code)
    assert done.returncode == 3
    assert "TRITON_INTERPRET=1" in done.stderr


FAKE_GPU = """
    import json, math, sys, types
    from pathlib import Path
    import torch
    from outrider.kernels import interpreter
    from outrider.selftest.attention import Heads
    from outrider.selftest.bench import measure
    from outrider.selftest.check import Outcome
    from outrider.selftest.report import Report
    from outrider.selftest.timing import Bench, Grid

    # SGLang's kernel in plain torch: it finds the same keys only if its arguments are right
    def decode_attention_fwd(q, k, v, out, starts, slots, logits, lse, splits, most, scale, *one):
        assert most == logits.shape[2] == lse.shape[2] and splits.max() <= most
        for i in range(len(q)):
            own = slots[starts[i] : starts[i + 1]]
            keys, values = (x[own].float().repeat_interleave(q.shape[1] // x.shape[1], 1)
                            for x in (k, v))
            weights = (torch.einsum("hd,lhd->hl", q[i].float(), keys) * scale).softmax(-1)
            out[i] = torch.einsum("hl,lhd->hd", weights, values)

    name = "sglang"
    for part in ("", ".srt", ".layers", ".attention", ".triton_ops"):
        name += part
        sys.modules[name] = types.ModuleType(name)
    host = types.ModuleType(name + ".decode_attention")
    host.decode_attention_fwd = decode_attention_fwd
    sys.modules[name].decode_attention = sys.modules[host.__name__] = host

    order = []

    def timer(work):
        order.append(id(work))
        work()
        return 0.05 + 0.001 * (len(order) % 7)

    free = int(sys.argv[2])
    bench = Bench(torch.device("cpu"), timer, lambda: free, processors=8)
    grid = Grid(batches=(1, 2), contexts=(32, 64), rows=(1, 3), heads=Heads(1, 4, 32),
                sample_rows=(2,), vocab=1000, repeats=4, warmups=1, copy_bytes=4096)
    steps = []
    with interpreter.checked():
        found = measure(bench, grid, steps.append)
    assert len(steps) == len(list(grid.steps())) + 1, steps
    outcome = Outcome("paged_attention: <made up>", "bitwise", False, False, "a < b", 0.1)
    environment = {"device": "GPU", "gpu": "made up", "arch": "sm_90"}
    report = Report({"date": "today", "argv": ["a b"]}, environment, [outcome], found)
    Path(sys.argv[1]).write_text(report.page())
    print(json.dumps(report.as_json() | {"order": order}))
"""


def test_a_benchmark_on_a_made_up_gpu(tmp_path):
    done = script(FAKE_GPU, tmp_path / "page.html", 10**9)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["passed"]
    assert found["notes"] == []
    assert len(found["measurements"]) == 1 + 8 * 3 + 3
    one = next(m for m in found["measurements"] if m.get("context") == 64 and m["rows"] == 3)
    assert one["p10_ms"] <= one["median_ms"] <= one["p90_ms"]
    assert one["repeats"] == 4
    assert one["bytes"] == 64 * 2 * 32 * 2  # each key and value once, whatever the rows
    assert one["gb_per_s"] == pytest.approx(one["bytes"] / one["median_ms"] / 1e6)
    # contenders take turns: no two runs of one follow each other within a shape
    rounds = [found["order"][-12:][i : i + 3] for i in range(0, 12, 3)]
    assert all(len(set(names)) == 3 for names in rounds)
    assert len({names[0] for names in rounds}) == 3

    page = (tmp_path / "page.html").read_text()
    assert page.count("<svg") == 4  # two batches, two kinds of plot
    assert "no timings" not in page.lower()
    for series in ("--ours", "--host", "--torch"):
        assert f"stroke: var({series})" in page
    assert "<made up>" not in page
    assert "not promised" in page
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert not re.search(r"#0101\d\d", page)


def test_shapes_without_memory_are_named(tmp_path):
    done = script(FAKE_GPU, tmp_path / "page.html", 10_000)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert any("batch 2 x context 64 needs" in note for note in found["notes"])
    assert not any(m.get("batch") == 2 and m["context"] == 64 for m in found["measurements"])
    assert "batch 2 x context 64 needs" in (tmp_path / "page.html").read_text()


def test_without_matplotlib_the_page_has_no_plots(tmp_path):
    code = "import sys\nsys.modules['matplotlib'] = None\n" + textwrap.dedent(FAKE_GPU)
    done = script(code, tmp_path / "page.html", 10**9)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "page.html").read_text()
    assert "<svg" not in page
    assert "outrider[tools]" in page
