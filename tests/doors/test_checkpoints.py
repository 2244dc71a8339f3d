"""Checkpoints by others: loading them works, or is refused in one line, soon and in little memory.

Each file of a tiny checkpoint is changed in every way that its form allows. Whatever comes of it is
loaded, as a model, as a head or as a tokenizer.
"""

from __future__ import annotations

import json
import resource
import shutil
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from outrider.clients.models import load_model, load_tokenizer  # noqa: E402
from outrider.drafters.heads import load_head  # noqa: E402
from outrider.errors import Unsupported  # noqa: E402

TINY = Path(__file__).parents[2] / "src" / "outrider" / "assets" / "tiny"
MOST_SECONDS = 5.0
MOST_BYTES = 300 << 20

pytestmark = pytest.mark.usefixtures("warm")
one_folder = settings(
    # each example makes the folder anew, before it draws what is changed
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    deadline=None,
)


@pytest.fixture(scope="module")
def warm():
    """Import what loading imports: it is not counted."""
    load_model(str(TINY / "target"), "auto")
    load_model(str(TINY / "draft"), "auto")
    load_tokenizer(str(TINY / "target"))


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def answer(load) -> object:
    """Return what is loaded, or None if it is refused as it should be."""
    began, before = time.process_time(), peak()
    try:
        return load()
    except Unsupported as refused:
        said = str(refused)
        assert len(said.splitlines()) == 1
        assert len(said) < 2500
        return None
    finally:
        assert time.process_time() - began < MOST_SECONDS
        assert peak() - before < MOST_BYTES


def as_head(path: Path) -> object:
    embedding = torch.zeros(512, 128, dtype=torch.float16)
    return load_head(path, embedding, 4, lm_head=embedding)


def load(path: Path) -> None:
    """Load a checkpoint as what it is, or was."""
    if path.name in ("target", "draft"):
        model = answer(lambda: load_model(str(path), "auto"))
        answer(lambda: load_tokenizer(str(path)))
        if model is not None:
            with torch.inference_mode():
                model(torch.zeros(1, 2, dtype=torch.long))
    else:
        answer(lambda: as_head(path))


@pytest.fixture
def copied(tmp_path):
    """Return a function that copies a tiny checkpoint, again for each example."""

    def copy(name: str) -> Path:
        path = tmp_path / name
        shutil.rmtree(path, ignore_errors=True)
        return Path(shutil.copytree(TINY / name, path))

    return copy


NAMES = st.sampled_from(["target", "draft", "head", "mtp", "dflash"])
numbers = st.one_of(
    st.integers(-2, 3),
    st.sampled_from([2**16, 10**6, 10**9, 10**12, 2**31, 2**63, 10**19, 10**45, -(2**63)]),
    st.floats(),
)
texts = st.text("a\u00e9\0\ud800/.", max_size=4)
scalars = st.none() | st.booleans() | numbers | texts
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=4,
)


@st.composite
def changed(draw, document: dict) -> dict:
    """Return a document with one place of it changed."""
    document = json.loads(json.dumps(document))
    place = document
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            return document
        key = draw(st.sampled_from(keys))
        if isinstance(place[key], dict | list) and place[key] and draw(st.booleans()):
            place = place[key]
            continue
        if draw(st.integers(0, 5)) == 0:
            del place[key]
        else:
            place[key] = draw(values)
        return document


@st.composite
def damaged(draw, content: bytes) -> bytes:
    """Return bytes that are cut, doubled, or have other bits."""
    at = draw(st.integers(0, len(content) - 1))
    what = draw(st.integers(0, 3))
    if what == 0:
        return content[:at]
    if what == 1:
        return (
            content[:at] + bytes([content[at] ^ (1 << draw(st.integers(0, 7)))]) + content[at + 1 :]
        )
    if what == 2:
        return content[:at] + draw(st.binary(min_size=1, max_size=9)) + content[at:]
    return content + content[at : at + 64]


def header_of(content: bytes) -> tuple[dict, bytes]:
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


@one_folder
@given(name=NAMES, data=st.data())
def test_configs(copied, name, data):
    file = copied(name) / "config.json"
    document = data.draw(changed(json.loads(file.read_text())))
    file.write_text(json.dumps(document))
    load(file.parent)


SIZES = [
    *("num_hidden_layers", "n_layer", "hidden_size", "n_embd", "vocab_size", "intermediate_size"),
    *("n_inner", "n_positions", "max_position_embeddings", "num_attention_heads", "n_head"),
    *("num_key_value_heads", "head_dim", "num_labels", "draft_vocab_size", "block_size"),
    *("partial_rotary_factor", "num_nextn_predict_layers", "n_ctx"),
]


@one_folder
@given(name=NAMES, key=st.sampled_from(SIZES), size=numbers)
def test_sizes(copied, name, key, size):
    file = copied(name) / "config.json"
    document = json.loads(file.read_text())
    inner = document.get("transformer_layer_config", document)
    inner[key] = size
    file.write_text(json.dumps(document))
    load(file.parent)


@one_folder
@given(name=NAMES, data=st.data())
def test_headers(copied, name, data):
    file = copied(name) / "model.safetensors"
    header, rest = header_of(file.read_bytes())
    text = json.dumps(data.draw(changed(header))).encode()
    length = data.draw(st.just(len(text)) | st.integers(0, 2**64 - 1))
    file.write_bytes(length.to_bytes(8, "little") + text + rest)
    load(file.parent)


@one_folder
@given(name=NAMES, data=st.data())
def test_bytes(copied, name, data):
    path = copied(name)
    file = data.draw(st.sampled_from(sorted(path.glob("*.*"))))
    content = file.read_bytes()
    if file.suffix == ".safetensors" and data.draw(st.booleans()):  # most of it is data
        length = 8 + int.from_bytes(content[:8], "little")
        file.write_bytes(data.draw(damaged(content[:length])) + content[length:])
    else:
        file.write_bytes(data.draw(damaged(content)))
    load(path)


FILES = st.one_of(
    st.sampled_from(["../x", "/etc/passwd", "..", "", ".", "config.json", "a.safetensors", "\0"]),
    st.just("shard.safetensors"),
    values,
)


@one_folder
@given(data=st.data())
def test_indexes(copied, data):
    path = copied("target")
    (path / "model.safetensors").rename(path / "shard.safetensors")
    names = list(header_of((path / "shard.safetensors").read_bytes())[0])
    index = {name: "shard.safetensors" for name in names if name != "__metadata__"}
    index[data.draw(st.sampled_from(sorted(index)))] = data.draw(FILES)
    document = {"metadata": data.draw(values), "weight_map": index}
    if data.draw(st.integers(0, 4)) == 0:
        document["weight_map"] = data.draw(values)
    (path / "model.safetensors.index.json").write_text(json.dumps(document))
    load(path)


@one_folder
@given(name=st.sampled_from(["tokenizer.json", "tokenizer_config.json"]), data=st.data())
def test_tokenizers(copied, name, data):
    file = copied("draft") / name
    file.write_text(json.dumps(data.draw(changed(json.loads(file.read_text())))))
    tokenizer = answer(lambda: load_tokenizer(str(file.parent)))
    assume(tokenizer is not None)
    tokenizer.decode(tokenizer.encode("On a misty morning"))


CALLS = st.sampled_from(["range(99999)", "messages", "'x' * 10**9", "range(10**9)", "[1] * 10**8"])


@st.composite
def templates(draw) -> str:
    """Return a chat template, of loops within loops at most."""
    if draw(st.integers(0, 5)) == 0:
        return draw(texts)
    inner = draw(
        st.sampled_from(["x", "{{ messages }}", "{{ 'x' * 10**9 }}", "{{ y }}", "{% if %}"])
    )
    for number in range(draw(st.integers(0, 3))):
        inner = f"{{% for i{number} in {draw(CALLS)} %}}{inner}{{% endfor %}}"
    return inner


@pytest.fixture
def impatient(monkeypatch):
    """Templates that loop are ended sooner here: most of them are."""
    monkeypatch.setattr("outrider.clients.chat.DEADLINE", 0.3)


@one_folder
@given(template=templates())
def test_chat_templates(impatient, template):
    from outrider.clients import render_chat

    class Tokenizer:
        def apply_chat_template(self, messages, **more):
            from transformers.utils.chat_template_utils import render_jinja_template

            return render_jinja_template([messages], chat_template=template)[0][0]

    said = answer(lambda: render_chat(Tokenizer(), [{"role": "user", "content": "a"}]))
    assert said is None or isinstance(said, str)
