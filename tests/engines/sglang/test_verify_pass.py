"""SGLang's own verify pass: chosen where it may be, checked before control uses it, and right.

SGLang has TARGET_VERIFY on GPU backends only. Here torch_native is taught it: see
`outrider_test_site.register_verify`.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import tiny_models
import torch
import workload
from server import unused_models
from sglang.srt.layers.attention import triton_backend
from sglang.srt.models import gemma2
from transformers import Gemma2Config

from outrider.core import Unsupported
from outrider.engines.sglang.arguments.settings import VERIFYING, verify_pass
from outrider.engines.sglang.verify_pass import _agree

MODEL = "stories15m"
WIDTH = 5
FLAGS = [
    *("--dtype", "float32", "--mem-fraction-static", "0.1", "--attention-backend", "torch_native"),
    *("--max-total-tokens", "4096", "--max-running-requests", "16"),
    *("--speculative-algorithm", "OUTRIDER", "--speculative-num-steps", str(WIDTH - 1)),
]


def arguments(backend, exact=False):
    return SimpleNamespace(attention_backend=backend, enable_deterministic_inference=exact)


@pytest.mark.parametrize("backend", VERIFYING)
def test_control_may_choose_where_bits_are_not_promised(backend):
    assert verify_pass(None, arguments(backend)) == "auto"
    assert verify_pass(None, arguments(backend, exact=True)) == "rows"
    assert verify_pass("rows", arguments(backend)) == "rows"
    assert verify_pass("target_verify", arguments(backend)) == "target_verify"
    with pytest.raises(Unsupported, match="deterministic"):
        verify_pass("auto", arguments(backend, exact=True))


@pytest.mark.parametrize("backend", ["outrider", "torch_native"])
def test_rows_elsewhere(backend):
    assert verify_pass(None, arguments(backend)) == "rows"
    for asked in ("target_verify", "auto"):
        with pytest.raises(Unsupported, match=backend):
            verify_pass(asked, arguments(backend))


def test_before_the_backend_is_known_nothing_is_refused():
    assert verify_pass("target_verify", arguments(None)) == "target_verify"


# both have the window of their configuration less one: SGLang's window is without the token itself
WINDOW = gemma2.get_attention_sliding_window_size(Gemma2Config(sliding_window=16))


@pytest.mark.parametrize("backend", VERIFYING)
def test_a_model_with_windows_has_rows(backend):
    """Where the two passes read other keys."""
    assert WINDOW == 15
    may = backend == "fa3"
    for asked in (None, "auto"):
        found = verify_pass(asked, arguments(backend), WINDOW)
        assert found == ("auto" if may else "rows")
        assert verify_pass(asked, arguments(backend), None) == "auto"
    if may:
        assert verify_pass("target_verify", arguments(backend), WINDOW) == "target_verify"
        mixed = SimpleNamespace(**vars(arguments(backend)), decode_attention_backend="triton")
        assert verify_pass("auto", mixed, WINDOW) == "rows"
    else:
        with pytest.raises(Unsupported, match=f"target_verify with sliding windows on {backend}"):
            verify_pass("target_verify", arguments(backend), WINDOW)


def test_sglangs_triton_backend_decodes_with_one_key_less(monkeypatch):
    """The reason for the rule: of 20 cached tokens, plain decoding in a window of 16 reads 15.

    Its extend kernel, which TARGET_VERIFY runs, masks by `query <= key + window`: it reads 16.
    """
    gather = "create_flashinfer_kv_indices_triton"
    monkeypatch.setattr(triton_backend, gather, MagicMock(), raising=False)
    known = {name: MagicMock() for name in ("translator", "plan", "req_to_token")}
    known |= {"window_kv_indptr": torch.zeros(2, dtype=torch.int64), "bs": 1, "device": "cpu"}
    known |= {"seq_lens": torch.tensor([20]), "req_pool_indices": torch.tensor([0])}
    known["sliding_window_size"] = WINDOW
    count = triton_backend.update_sliding_window_buffer
    wanted = inspect.signature(count).parameters
    _, _, lens, starts = count(**{name: known[name] for name in known if name in wanted})
    assert (lens.tolist(), starts.tolist()) == ([15], [5])


def test_rounding_agrees_and_other_rows_do_not():
    logits = torch.randn(WIDTH, 1000, generator=torch.Generator().manual_seed(0))
    assert _agree(logits, logits.bfloat16())
    assert not _agree(logits, logits.roll(1, 0))
    assert not _agree(logits, torch.full_like(logits, torch.nan))


def body(text, tokens=40, **options):
    params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True, **options}
    return {"text": text, "sampling_params": params}


# repeated openings give n-grams something to find
ASKED = [
    *(body(f"{text} {text} {text}") for text in workload.OPENINGS),
    # logprobs keep to rows
    {**body(workload.OPENINGS[0]), "return_logprob": True},
    # beyond the end of the context there is no room for padding
    body("word " * 195, tokens=58),
]


@pytest.mark.parametrize(
    ("setting", "drafter", "first"),
    [("target_verify", "ngram", ""), ("auto", "adaptive", ""), ("auto", "adaptive", "shifted")],
)
def test_answers_and_passes(launch, model_dir, tmp_path, setting, drafter, first):
    profile, passes = tmp_path / "profile.yaml", tmp_path / "passes"
    # drafts of the device are verified by rows
    options = "drafters: {adaptive: {device: false}}\n" if drafter == "adaptive" else ""
    profile.write_text(f"verify_pass: {setting}\ndrafter: {drafter}\n{options}")
    passes.write_text(f"{first}\n")
    environment = {"OUTRIDER_CONFIG": str(profile), "OUTRIDER_TEST_VERIFY": str(passes)}
    name = f"verify-{setting}{first}"
    with launch(name, model_dir(MODEL), *FLAGS, **environment) as server:

        def answers(concurrency, **options):
            asked = [
                ("/generate", {**ask, "sampling_params": {**ask["sampling_params"], **options}})
                for ask in ASKED
            ]
            return [answer["output_ids"] for answer in server.ask_all(asked, concurrency)]

        plain = answers(3, custom_params={"outrider": {"max_drafts": 0}})
        assert passes.read_text() == f"{first}\n"
        for _ in range(5):
            assert answers(1) == answers(3) == plain
            if len(passes.read_text()) > len(first) + 1:
                break  # control drafts when it is worth it, on a busy machine later
        log = server.log.read_text()
    rows = [int(line) for line in passes.read_text().split()[bool(first) :]]
    assert rows, "TARGET_VERIFY never ran"
    assert all(count % WIDTH == 0 for count in rows)
    if first:  # the check alone ran
        assert rows == [WIDTH]
        assert "TARGET_VERIFY is not used" in log
    elif setting == "target_verify":
        assert max(rows) > WIDTH  # several requests in one pass
        assert len(rows) > 20


def test_a_server_of_a_model_with_windows(launch, profile, tmp_path):
    """TARGET_VERIFY is not run, not even to compare it: that would be within a window."""
    model, passes = tiny_models.make("gemma3_text", tmp_path / "model"), tmp_path / "passes"
    passes.write_text("")
    files = ",".join({*unused_models().split(",")} - {"gemma3_causal"})
    environment = {"OUTRIDER_TEST_VERIFY": str(passes), "SGLANG_DISABLED_MODEL_ARCHS": files}
    with launch("verify-window", model, *FLAGS, **environment, **profile()) as server:
        asked = [("/generate", body(f"{text} {text}")) for text in workload.OPENINGS[:4]]
        plain = {"custom_params": {"outrider": {"max_drafts": 0}}}
        silent = [("/generate", body(f"{t} {t}", **plain)) for t in workload.OPENINGS[:4]]
        drafted, answers = server.ask_all(asked, 2), server.ask_all(silent, 2)
        assert [a["output_ids"] for a in drafted] == [a["output_ids"] for a in answers]
        assert "drafts are verified by rows" in server.log.read_text()
    assert passes.read_text() == ""
