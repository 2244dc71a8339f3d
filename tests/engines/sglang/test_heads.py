"""Heads in the server: they change speed only, wherever the target's states come from."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import parity
import pytest
import torch
from outrider_test_site import no_repeat_processor
from safetensors.torch import load_file, save_file
from server import accepted
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from outrider.core import Unsupported
from outrider.drafters.heads import load_head
from outrider.drafters.heads.blocks import BlockModel
from outrider.drafters.heads.drafter import HeadModel
from outrider.engines.sglang.arguments import settings
from outrider.engines.sglang.drafts import heads, slot_blocks
from outrider.engines.sglang.drafts.heads import HeadSource, draft_kind
from outrider.engines.sglang.drafts.slot_blocks import SglangBlocks
from outrider.engines.sglang.drafts.slot_heads import MAX_BRANCHES, SglangHead
from outrider.engines.sglang.plugin import installed_hooks
from outrider.serving.profile import Profile

VERSION = installed_hooks().version
TINY = Path(__file__).parents[3] / "src" / "outrider" / "assets" / "tiny"
TARGET, HEAD, DFLASH = TINY / "target", TINY / "head", TINY / "dflash"
FLAGS = [
    *("--dtype", "float32", "--mem-fraction-static", "0.1", "--attention-backend", "outrider"),
    *("--max-total-tokens", "2048", "--max-running-requests", "8", "--enable-metrics"),
    *("--chunked-prefill-size", "32", "--speculative-algorithm", "OUTRIDER"),
]


def random_head(folder, head=HEAD):
    """Return a head of random weights; a DFlash head reads two layers, and has shorter blocks."""
    shutil.copytree(head, folder)
    weights = load_file(folder / "model.safetensors")
    if head == DFLASH:
        config = json.loads((folder / "config.json").read_text())
        config["block_size"], config["dflash_config"]["target_layer_ids"] = 5, [2, 0]
        (folder / "config.json").write_text(json.dumps(config))
        weights["fc.weight"] = weights["fc.weight"][:, : 2 * config["hidden_size"]]
    generator = torch.Generator().manual_seed(0)
    for name, weight in weights.items():
        if weight.is_floating_point():
            weights[name] = torch.randn(weight.shape, generator=generator).to(weight.dtype) * 0.1
    save_file(weights, folder / "model.safetensors")
    return folder


def as_speculators(folder):
    """Return the tiny head in the format of speculators."""
    folder.mkdir()
    config = json.loads((HEAD / "config.json").read_text())
    ids = [i + 1 for i in config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]]
    found = {
        "speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"],
        "transformer_layer_config": config, "eagle_aux_hidden_state_layer_ids": ids,
        "draft_vocab_size": config["draft_vocab_size"],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(found))
    weights = load_file(HEAD / "model.safetensors")
    named = {n.replace("midlayer.", "layers.0."): w for n, w in weights.items()}
    save_file(named, folder / "model.safetensors")
    return folder


def test_the_answers_are_those_of_bare_sglang(launch, deterministic, tmp_path, record_property):
    """Requests of every kind, by several heads: trained, random, as chains and as trees."""
    drafters = {
        "eagle3": {},
        "tree": {"path": str(HEAD), "siblings": 2, "min_survival": 0.0},
        "wide": {"path": str(HEAD), "width": 3, "min_survival": 0.0},
        "random": {"path": str(random_head(tmp_path / "random")), "min_survival": 0.0},
        "dflash": {"path": str(DFLASH), "siblings": 1, "min_survival": 0.0},
        "any": {"path": str(random_head(tmp_path / "any", DFLASH)), "min_survival": 0.0},
        "adaptive": {},
        "suffix": {"min_vote": 0.0},
    }
    environment = parity.profile(tmp_path, drafters, max_drafts=6) | parity.RETRACTING
    mode = [*parity.DETERMINISTIC, "--speculative-draft-model-path", str(HEAD)]
    bare = deterministic("heads", TARGET)
    ours = launch("heads", TARGET, *parity.TIGHT, *parity.OUTRIDER, *mode, **environment)
    phases = parity.seeded_phases("stories260k", 60, 32, no_repeat_processor())
    with bare, ours:
        comparison = parity.compare_seeded(bare, ours, phases, (4, 16), drafters)
        parity.check_traffic(ours, drafters=["eagle3", "tree", "wide", "dflash"])
        assert not parity.faults(ours)
    comparison.conclude(0.0)
    record_property("tokens compared", comparison.tokens)


def ask(server, texts, **wishes):
    params = {"temperature": 0, "max_new_tokens": 40, "custom_params": {"outrider": wishes}}
    bodies = [{"text": text, "sampling_params": params} for text in texts]
    return server.ask_all([("/generate", body) for body in bodies], 4)


def tokens_per_step(answers):
    meta = [answer["meta_info"] for answer in answers]
    return 1 + sum(map(accepted, meta)) / sum(m["spec_verify_ct"] for m in meta)


TEXTS = [
    "The outrider rides ahead of the",
    "Ada laughed, and Old Bram said that the water was high and that the road to the mill was not",
    "Look twice at the water and once at the sky, and then",
]


def test_states_come_from_chunks_and_from_the_radix_cache(launch, tmp_path):
    """Prompts of several chunks, cached ones, and answers that go on: drafts stay as good."""
    head = as_speculators(tmp_path / "head")
    more = {"blocks": {"path": str(DFLASH), "min_survival": 0.0}}
    environment = parity.profile(tmp_path, more, report_acceptance=True)
    flags = [*FLAGS, "--speculative-draft-model-path", str(head)]
    with launch("states", TARGET, *flags, **environment) as server:
        plain = ask(server, TEXTS, max_drafts=0)
        server.post("/flush_cache", {})
        first = ask(server, TEXTS, drafter="eagle3")
        again = ask(server, TEXTS, drafter="eagle3")
        assert [a["meta_info"]["cached_tokens"] > 0 for a in again] == [True] * len(TEXTS)
        for answers in (first, again):
            assert [a["output_ids"] for a in answers] == [a["output_ids"] for a in plain]
            assert tokens_per_step(answers) > 3
        assert tokens_per_step(again) > tokens_per_step(first) - 0.3
        # what was answered without drafts is a prefix now: its states are there too
        longer = [text + a["text"][:60] for text, a in zip(TEXTS, plain, strict=True)]
        server.post("/flush_cache", {})
        ask(server, longer, max_drafts=0)
        assert tokens_per_step(ask(server, longer, drafter="eagle3")) > 2
        drafted = ask(server, longer, drafter="blocks", explain=True)
        assert tokens_per_step(drafted) > 2.5
        steps = drafts_of(longer, drafted)
        assert len(steps) > 20
        assert drafts_with_transformers(steps) == [drafts for _, drafts in steps]
        assert drafts_with_transformers(steps, shift=1) != [drafts for _, drafts in steps]
        response = server.post("/generate", {"text": "a", "return_hidden_states": True})
        assert response.status_code == 400
        server.settle_down()


def drafts_of(texts, answers):
    """Return what was drafted in each step, and the tokens before."""
    tokenizer, found = AutoTokenizer.from_pretrained(TARGET), []
    for text, answer in zip(texts, answers, strict=True):
        prompt, output = tokenizer.encode(text), answer["output_ids"]
        steps = answer["meta_info"]["outrider_steps"]
        emitted = len(output) - sum(len(step["emitted"]) for step in steps)  # by the prefill
        for step in steps:
            if step["drafts"]:
                found.append(([*prompt, *output[:emitted]], step["drafts"]))
            emitted += len(step["emitted"])
    return found


@torch.inference_mode()
def drafts_with_transformers(steps, shift=0):
    """Return what the DFlash head drafts there, from the states of Transformers.

    shift: by how many places the states are wrong
    """
    target, found = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval(), []
    model = BlockModel(tiny_head(DFLASH))
    for tokens, drafts in steps:
        states = target(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        read = torch.stack([states[i][0] for i in model.head.hidden_layers], 1)
        sequence = model.open(None)
        sequence.tell(0, model.head.reduce(read.roll(shift, 0)[:-1]))
        model.extend([(sequence, tokens)])
        found.append(model.head.logits(sequence.block.states).argmax(-1)[: len(drafts)].tolist())
    return found


def with_mtp_layer(folder):
    """Return the tiny target with the tiny MTP head among its weights, named as DeepSeek does."""
    shutil.copytree(TARGET, folder)
    config = json.loads((folder / "config.json").read_text())
    wide, layers = config["intermediate_size"], config["num_hidden_layers"]
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    names = {"token_layernorm": "enorm", "hidden_layernorm": "hnorm", "input_proj": "eh_proj",
             "final_layernorm": "shared_head.norm"}  # fmt: skip
    weights = load_file(folder / "model.safetensors")
    for name, weight in load_file(TINY / "mtp" / "model.safetensors").items():
        rest = name.removeprefix("mtp_layers.0.")
        first = rest.partition(".")[0]
        if ".mlp." in name:  # the layer is as wide as the target's: zeros change nothing
            side = rest.startswith("mlp.down_proj")
            missing = wide - weight.shape[side]
            weight = functional.pad(weight, (0, missing) if side else (0, 0, 0, missing))
        ours = rest.replace(first, names.get(first, first), 1)
        weights[f"model.layers.{layers}.{ours}"] = weight.contiguous()
    save_file(weights, folder / "model.safetensors")
    return folder


def test_heads_that_read_the_last_states(launch, tmp_path):
    """MTP: nothing is captured within the target, one has it among its weights."""
    target = with_mtp_layer(tmp_path / "target")
    heads = {"own": {"kind": "mtp"}, "fixed": {"kind": "mtp", "depth": 6}}
    environment = parity.profile(tmp_path, heads, report_acceptance=True)
    flags = [*FLAGS, "--speculative-draft-model-path", str(TINY / "mtp")]
    with launch("mtp", target, *flags, **environment) as server:
        plain = ask(server, TEXTS, max_drafts=0)
        for name in ("mtp", "own", "fixed"):
            drafted = ask(server, TEXTS, drafter=name)
            assert [a["output_ids"] for a in drafted] == [a["output_ids"] for a in plain]
            assert tokens_per_step(drafted) > 3
        assert server.metrics()["outrider:device_steps_total"] > 5
        server.settle_down()


# -- without a server


def tiny_head(path):
    target = load_file(TARGET / "model.safetensors")
    embedding = target["model.embed_tokens.weight"].float()
    return load_head(path, embedding, 4, lm_head=embedding)


@pytest.fixture
def head():
    return tiny_head(HEAD)


@pytest.fixture
def dflash():
    return tiny_head(DFLASH)


def tiny_runner():
    """As much of SGLang's as a head looks at: two requests in a table of scattered slots."""
    table = torch.randperm(600, generator=torch.Generator().manual_seed(1)).view(3, 200)
    return SimpleNamespace(
        model_config=SimpleNamespace(context_len=200),
        req_to_token_pool=SimpleNamespace(req_to_token=(table + 1).int()),
        token_to_kv_pool_allocator=SimpleNamespace(size=600),
        page_size=1,
    )


@pytest.fixture
def runner():
    return tiny_runner()


class Req:
    """As much of SGLang's request as is looked at, in either version."""

    def __init__(self, line):
        self.req_pool_idx, self.kv = line, self


class Told:
    """Two requests, read by the server's head and by the one of Transformers."""

    def __init__(self, head, runner, slot=SglangHead, plain=HeadModel):
        self.slot, self.plain = slot(head, runner, [1, 2, 3], VERSION), plain(head)
        self.table = runner.req_to_token_pool.req_to_token
        generator = torch.Generator().manual_seed(2)
        self.tokens = torch.randint(1, 500, (3, 200), generator=generator)
        self.states = torch.randn(3, 200, 3, 128, generator=generator)
        self.lines = {"a": 2, "b": 1}
        self.reqs = {name: Req(line) for name, line in self.lines.items()}
        self.sequences = {n: self.plain.open(None) for n in self.reqs}

    def tell(self, mode=ForwardMode.DECODE, **spans):
        """The target has read these tokens, from here to there, in one pass."""
        rows = [(self.lines[name], p) for name, span in spans.items() for p in range(*span)]
        lines, positions = torch.tensor(rows).T
        batch = SimpleNamespace(
            forward_mode=mode, out_cache_loc=self.table[lines, positions].long(),
            seq_lens=positions + 1, spec_info=SimpleNamespace(positions=positions),
            **{VERSION.prefix_lens: [a for a, _ in spans.values()]},
            **{VERSION.extend_lens: [b - a for a, b in spans.values()]},
        )  # fmt: skip
        self.slot.tell(batch, self.states[lines, positions].flatten(1))
        for name, (start, end) in spans.items():
            states = self.states[self.lines[name], start:end]
            self.sequences[name].tell(start, self.plain.head.reduce(states))

    def prefill(self, **spans):
        """The server's prefill batch: (cached before, read by it) of each request."""
        lines = [self.lines[name] for name in spans]
        mine = [self.tokens[self.lines[name], a : a + n] for name, (a, n) in spans.items()]
        batch = SimpleNamespace(
            reqs=[self.reqs[name] for name in spans], input_ids=torch.cat(mine),
            req_pool_indices=torch.tensor(lines),
            **{VERSION.prefix_lens: [a for a, _ in spans.values()]},
            **{VERSION.extend_lens: [n for _, n in spans.values()]},
        )  # fmt: skip
        self.tell(ForwardMode.EXTEND, **{name: (a, a + n) for name, (a, n) in spans.items()})
        for name, (a, n) in spans.items():
            sequence, start = self.sequences[name], max(1, a)
            self.plain.catch_up([(sequence, self.tokens[self.lines[name], start : a + n].tolist())])
        self.slot.prefill(batch)

    def extend(self, **new):
        """Read tokens of some requests. Return both heads' logits."""
        request = {n: SimpleNamespace(req=self.reqs[n]) for n in new}
        ours = self.slot.extend([(self.slot.open(request[n]), t) for n, t in new.items()])
        theirs = self.plain.extend([(self.sequences[n], t) for n, t in new.items()])
        return ours, theirs


@torch.inference_mode()
def test_slots_hold_what_a_cache_of_its_own_holds(head, runner):
    """Prompts in chunks, drafts, and what the target read of them: as in Transformers."""
    told = Told(head, runner)
    told.prefill(a=(0, 70), b=(0, 9))
    told.prefill(a=(70, 40), b=(9, 1))
    torch.testing.assert_close(*told.extend(a=[7], b=[5]), atol=2e-5, rtol=1e-5)
    for _ in range(3):  # drafts go on from the head's own states
        torch.testing.assert_close(*told.extend(b=[9], a=[8]), atol=2e-5, rtol=1e-5)
    told.tell(a=(110, 113), b=(10, 11))  # two drafts were right, and are read again
    for name, length in (("a", 111), ("b", 11)):
        sequence = told.slot.open(SimpleNamespace(req=told.reqs[name]))
        told.slot.truncate(sequence, length)
        told.plain.truncate(told.sequences[name], length)
    torch.testing.assert_close(*told.extend(a=[8, 8, 3], b=[2]), atol=2e-5, rtol=1e-5)


@torch.inference_mode()
def test_slots_hold_branches(head, runner):
    """Drafts of a tree that follow the same token: each sees its own way, and nothing else."""
    told = Told(head, runner)
    told.prefill(a=(0, 70), b=(0, 9))
    told.extend(a=[7], b=[5])
    both, free = [], len(told.slot._scratch)

    def read(*steps):
        """Read a draft for each branch of these. Return the branches of both heads."""
        pairs = [(told.slot.fork(x), told.plain.fork(y)) for (x, y), _ in steps]
        tokens = [[token] for _, token in steps]
        ours = told.slot.extend([*zip([x for x, _ in pairs], tokens, strict=True)])
        theirs = told.plain.extend([*zip([y for _, y in pairs], tokens, strict=True)])
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5)
        both.extend(pairs)
        return pairs

    a, b = (
        (told.slot.open(SimpleNamespace(req=told.reqs[name])), told.sequences[name])
        for name in ("a", "b")
    )
    first, second, third = read((a, 3), (a, 4), (b, 3))
    deep, _, _ = read((first, 9), (third, 9), (first, 8))
    read((deep, 1), (second, 1))
    for branch, _ in both:
        told.slot.close(branch)
    assert len(told.slot._scratch) == len(set(told.slot._scratch)) == free
    # the text's own slots are as they were
    torch.testing.assert_close(*told.extend(a=[3], b=[3]), atol=2e-5, rtol=1e-5)


@torch.inference_mode()
def test_slots_hold_what_is_read_unseen(head, runner):
    """Tokens that are on the device only; the second sequence has slots for one of them."""
    told = Told(head, runner)
    told.prefill(a=(0, 70), b=(0, 9))
    told.extend(a=[7], b=[5])
    both = [told.slot.open(SimpleNamespace(req=told.reqs[name])) for name in ("a", "b")]
    lengths, slot = [s.length for s in both], told.table[told.lines["b"], 11].long()
    told.slot._pool[:, :, slot] = 7.0  # it may be another request's
    unrolled = told.slot.unroll(both, [3, 1])
    for depth, (a, b) in enumerate([(3, 4), (8, 8), (9, 1)]):
        ours = unrolled.read(torch.tensor([a, b]))
        assert not ours.isnan().any()
        count = 1 if depth else 2
        segments = [(told.sequences["a"], [a]), (told.sequences["b"], [b])][:count]
        theirs = told.plain.extend(segments)
        torch.testing.assert_close(ours[:count], theirs, atol=2e-5, rtol=1e-5)
    assert (told.slot._pool[:, :, slot] == 7.0).all()
    assert [s.length for s in both] == lengths


@torch.inference_mode()
def test_a_prefix_in_the_radix_cache_has_its_states(head, runner):
    """Another request goes on from slots that the first one has filled."""
    told = Told(head, runner)
    told.prefill(a=(0, 50))
    told.table[1, :30] = told.table[2, :30]
    told.tokens[1, :30] = told.tokens[2, :30]
    told.states[1, :30] = told.states[2, :30]
    told.sequences["b"].tell(0, head.reduce(told.states[1, :30]))
    told.plain.catch_up([(told.sequences["b"], told.tokens[1, 1:30].tolist())])
    told.prefill(b=(30, 12))
    torch.testing.assert_close(*told.extend(b=[5]), atol=2e-5, rtol=1e-5)


class ToldBlocks(Told):
    """Two requests, read by the server's DFlash head and by the one of Transformers."""

    def __init__(self, head, runner):
        super().__init__(head, runner, SglangBlocks, BlockModel)

    def drafts(self, **ends):
        """Return both heads' logits of the drafts after so many tokens of each request."""
        request = [SimpleNamespace(req=self.reqs[n], length=end) for n, end in ends.items()]
        ours = [self.slot.open(r) for r in request]
        theirs = [self.sequences[n] for n in ends]
        unread = []
        for sequence, (name, end) in zip(theirs, ends.items(), strict=True):
            self.plain.truncate(sequence, end - 1)
            unread.append(self.tokens[self.lines[name], sequence.length : end].tolist())
        last = [tokens[-1:] for tokens in unread]
        found = [(self.slot.extend([*zip(ours, last, strict=True)]),
                  self.plain.extend([*zip(theirs, unread, strict=True)]))]  # fmt: skip
        for _ in range(self.slot.head.block.size - 2):
            found.append((self.slot.extend([(s, [1]) for s in ours]),
                          self.plain.extend([(s, [1]) for s in theirs])))  # fmt: skip
        return [torch.stack(each) for each in zip(*found, strict=True)]


NEAR = {"atol": 2e-5, "rtol": 1e-5}


@torch.inference_mode()
def test_slots_hold_the_context_of_blocks(dflash, runner, monkeypatch):
    """Chunks, rows of a decode batch, SGLang's own verify pass, a shared prefix; many requests."""
    told = ToldBlocks(dflash, runner)
    told.tell(ForwardMode.EXTEND, a=(0, 70), b=(0, 1))
    told.tell(ForwardMode.EXTEND, a=(70, 110), b=(1, 9))
    torch.testing.assert_close(*told.drafts(a=111, b=10), **NEAR)
    told.tell(b=(9, 12), a=(110, 111))
    told.tell(ForwardMode.TARGET_VERIFY, a=(111, 113), b=(12, 13))
    monkeypatch.setattr(slot_blocks, "MAX_BLOCKS", 1)  # a pass for each
    torch.testing.assert_close(*told.drafts(a=114, b=13), **NEAR)
    told.table[1, :30], told.states[1, :30] = told.table[2, :30].clone(), told.states[2, :30]
    told.sequences["b"] = told.plain.open(None)
    told.sequences["b"].tell(0, dflash.reduce(told.states[1, :30]))
    torch.testing.assert_close(*told.drafts(b=31), **NEAR)


@torch.inference_mode()
def test_twin_a_wrong_position_is_seen(dflash, runner, monkeypatch):
    right = slot_blocks.positions_of
    wrong = lambda batch, version: right(batch, version) + 1  # noqa: E731
    monkeypatch.setattr(slot_blocks, "positions_of", wrong)
    told = ToldBlocks(dflash, runner)
    told.tell(ForwardMode.EXTEND, a=(0, 70), b=(0, 9))
    ours, theirs = told.drafts(a=71, b=10)
    assert not torch.allclose(ours, theirs, atol=0.01)


def test_the_kernels_compute_the_same():
    """The tests of slots above, by the Triton kernels that a GPU would run."""
    env = {**os.environ, "OUTRIDER_KERNELS": "triton", "TRITON_INTERPRET": "1"}
    chosen = "slots_hold or prefix_in_the_radix"  # pairs and blocks
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen]
    done = subprocess.run(
        [*command, __file__], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:]


def test_states_that_cannot_be_read_are_a_fault_of_drafting(head, runner):
    told = Told(head, runner)
    batch = SimpleNamespace(out_cache_loc=torch.tensor([1]))
    told.slot.tell(batch, torch.zeros(1, 5))  # the target's step goes on
    sequence = told.slot.open(SimpleNamespace(req=told.reqs["a"]))
    with pytest.raises(RuntimeError, match="states were not read"):
        told.slot.extend([(sequence, [1, 2])])
    told.slot.extend([(sequence, [1, 2])])


def test_what_a_token_takes(head, dflash, runner):
    made = SglangHead(head, runner, [1, 2, 3], VERSION)
    assert made.pool_bytes == HeadSource(str(HEAD)).cell_bytes(4) * (601 + MAX_BRANCHES)
    blocks = SglangBlocks(dflash, runner, [1, 2, 3], VERSION)
    scratch = slot_blocks.MAX_BLOCKS * dflash.block.size
    assert blocks.pool_bytes == HeadSource(str(DFLASH)).cell_bytes(4) * (601 + scratch)


def arguments(draft, target=TARGET):
    path = None if draft is None else str(draft)
    return SimpleNamespace(speculative_draft_model_path=path, model_path=str(target))


def test_kinds_of_draft_models(tmp_path):
    assert draft_kind(arguments(None)) is None
    assert draft_kind(arguments(HEAD)) == "eagle3"
    assert draft_kind(arguments(DFLASH)) == "dflash"
    assert draft_kind(arguments(TARGET)) == "model", "it has no MTP layer"
    own = with_mtp_layer(tmp_path / "target")
    assert draft_kind(arguments(own, own)) == "mtp"
    assert draft_kind(arguments(f"{own}/", own)) == "mtp"
    assert draft_kind(arguments(own)) == "model", "of another target it is a draft model"
    with pytest.raises(Unsupported, match="the draft model"):
        draft_kind(arguments(tmp_path / "nothing"))


def test_names_of_heads(tmp_path):
    more = Profile(drafters={"ngram": {"min_n": 1}, "mine": {"path": "x"}, "own": {"kind": "mtp"}})
    found = {"mine": HeadSource("x"), "own": HeadSource(str(TARGET), "mtp")}
    assert heads.head_sources(more, arguments(HEAD)) == {"eagle3": HeadSource(str(HEAD)), **found}
    assert more.names("eagle3") == ["adaptive", "ngram", "mine", "own", "eagle3", "none"]
    with pytest.raises(Unsupported, match="two heads of the name 'eagle3'"):
        heads.head_sources(Profile(drafters={"eagle3": {"path": "x"}}), arguments(HEAD))
    with pytest.raises(Unsupported, match="kind 'eagle3' of the profile's drafter 'own'"):
        heads.head_sources(Profile(drafters={"own": {"kind": "eagle3"}}), arguments(None))
    own = str(with_mtp_layer(tmp_path / "target"))
    found = heads.head_sources(Profile(), arguments(own, own))
    assert found == {"mtp": HeadSource(own, "mtp")}
    assert found["mtp"].layers(4) == (4,)
    assert found["mtp"].cell_bytes(4) == HeadSource(str(TINY / "mtp")).cell_bytes(4)


def test_layers_that_sglang_does_not_give_are_refused():
    assert heads.layers_to_capture([HeadSource(str(HEAD))], 4) == [1, 2, 3]
    with pytest.raises(Unsupported, match="layers 1 to 2, or"):
        heads.layers_to_capture([HeadSource(str(HEAD))], 3)


def test_hidden_states_for_callers_and_for_heads_are_two_things():
    args = SimpleNamespace(enable_return_hidden_states=True)
    for also in ({}, {"return_hidden_states_mode": "last"}):
        args.enable_return_hidden_states = not also
        args.__dict__.update(also)
        with pytest.raises(Unsupported, match=r"return-hidden-states.* with a head"):
            settings._check_heads({"eagle3": HeadSource(str(HEAD))}, args)
    with pytest.raises(Unsupported, match="the name 'ngram'"):
        settings._check_heads({"ngram": HeadSource(str(HEAD))}, args)
    with pytest.raises(Unsupported, match="not a head"):
        settings._check_heads({"mine": HeadSource(str(TARGET))}, args)
