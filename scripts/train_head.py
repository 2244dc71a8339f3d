"""Train a head for a small model: for tests, for narrow domains, to see how it works.

    python scripts/train_head.py MODEL --out HEAD [--kind eagle3|mtp|dflash] [--text FILE ...]

The head learns the target's own distribution on texts: those of `--text`, or ones that the target
writes itself. EAGLE-3 and MTP are unrolled: after the first token the head reads its own states, as
it does when it drafts. DFlash fills in blocks that begin anywhere in the text. Run again with the
same `--out`, training goes on where it stopped. A head for production wants far more text and a
GPU: use SpecForge or speculators, whose formats Outrider reads.
"""

from __future__ import annotations

import argparse
import json
import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from outrider.drafters.heads import (
    Block,
    DFlashHead,
    Eagle3Head,
    HeadConfig,
    MTPHead,
)

UNROLLED, DECAY = 4, 0.8
"""Draft steps in training, and the weight of each one against the one before it."""

STRIDE = 16
"""So many tokens lie between the beginnings of two pieces of text."""

ANCHORS = 12
"""Blocks in a piece of text, for DFlash."""

AnyHead = Eagle3Head | MTPHead | DFlashHead


def main() -> None:
    """Train, or go on training, and write the head."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kind", choices=("eagle3", "mtp", "dflash"), default="eagle3")
    parser.add_argument("--text", type=Path, nargs="+", default=[])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=96, help="tokens of a piece of text")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draft-vocab", type=int, metavar="N",
                        help="draft the N most frequent tokens only (eagle3)")  # fmt: skip
    parser.add_argument("--intermediate", type=int, help="width of the MLP; the target's if unset")
    parser.add_argument("--layers", type=int, default=1, help="of the head (dflash)")
    parser.add_argument("--block", type=int, default=8, help="tokens of a block (dflash)")
    parser.add_argument("--mask-token", type=int, metavar="ID",
                        help="stands for a draft (dflash); the padding token if unset")  # fmt: skip
    args = parser.parse_args()
    if problem := problem_with(args):
        parser.error(problem)
    torch.manual_seed(args.seed)
    target = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    target.requires_grad_(False)
    tokens = read(target, args.model, args.text, args.length)
    if not len(tokens):
        parser.error(
            f"--text has fewer than {args.length} tokens: give more, or a smaller --length"
        )
    head = new_head(target, tokens, args)
    losses = train(head, target, tokens, args)
    save(head, target, args, losses)
    plot(losses, args.out / "loss.svg")
    print(f"wrote {args.out}; loss {sum(losses[-50:]) / max(1, len(losses[-50:])):.3f}")


def problem_with(args: argparse.Namespace) -> str | None:
    """Return what cannot be done, if anything."""
    if not (args.model / "config.json").is_file():
        return f"no model at {args.model}: name a directory with config.json and weights"
    for file in args.text:
        if not file.is_file():
            return f"no text at {file}"
    if args.draft_vocab is not None and (args.kind != "eagle3" or args.draft_vocab < 1):
        return "--draft-vocab is for --kind eagle3, and at least 1"
    if args.block < 2 or args.length < 2 * args.block + UNROLLED:
        return f"--block must be at least 2, and --length at least {2 * args.block + UNROLLED}"
    if args.layers != 1 and args.kind != "dflash":
        return "--layers is for --kind dflash: other heads have one layer"
    return None


def train(
    head: AnyHead, target: PreTrainedModel, tokens: Tensor, args: argparse.Namespace
) -> list[float]:
    """Train, and keep what is needed to go on, in `training.pt`. Return the loss of each step."""
    loss_of = block_loss if isinstance(head, DFlashHead) else unrolled_loss
    trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, args.rate, betas=(0.9, 0.95))
    state, done, losses = args.out / "training.pt", 0, []
    if state.exists():
        kept = torch.load(state, weights_only=True)
        head.load_state_dict(kept["head"])
        optimizer.load_state_dict(kept["optimizer"])
        done, losses = kept["done"], kept["losses"]
    for step in track(range(done, args.steps), "training"):
        for group in optimizer.param_groups:
            group["lr"] = args.rate * 0.5 * (1 + math.cos(math.pi * step / args.steps))
        loss = loss_of(head, target, tokens[torch.randint(len(tokens), (args.batch,))])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        losses.append(loss.item())
        if (step + 1) % 250 == 0 or step + 1 == args.steps:
            args.out.mkdir(parents=True, exist_ok=True)
            kept = {"head": head.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**kept, "done": step + 1, "losses": losses}, state)
    return losses


@torch.inference_mode()
def read(target: PreTrainedModel, path: Path, texts: list[Path], length: int) -> Tensor:
    """Return pieces of text as tokens, [pieces, length]."""
    if texts:
        tokenizer = AutoTokenizer.from_pretrained(path)
        ids = [i for text in texts for i in tokenizer.encode(text.read_text("utf-8"))]
        if len(ids) < length:
            return torch.empty(0, length, dtype=torch.int64)
        return torch.tensor(ids).unfold(0, length, STRIDE)
    start = target.config.bos_token_id or 0
    written = [
        target.generate(
            torch.full((64, 1), start), do_sample=True, temperature=temperature,
            min_new_tokens=2 * length, max_new_tokens=2 * length, pad_token_id=start,
        )
        for temperature in track([0.3, 0.6, 0.8, 1.0] * 4, "the target writes")
    ]  # fmt: skip
    # pieces begin anywhere: a head that only ever saw beginnings knows nothing else
    return torch.cat(written).unfold(1, length, STRIDE).flatten(0, 1).clone()


def new_head(target: PreTrainedModel, tokens: Tensor, args: argparse.Namespace) -> AnyHead:
    """Return an untrained head. It shares the target's embedding, and begins with its output."""
    config, layers = target.config, target.config.num_hidden_layers
    shape = {**config.to_dict(), **kind_shape(args)}
    size = HeadConfig.of(shape)
    head: AnyHead
    if args.kind == "mtp":
        head = MTPHead(size, layers)
    elif args.kind == "dflash":
        mask = config.pad_token_id if args.mask_token is None else args.mask_token
        block = Block(args.block, config.vocab_size - 1 if mask is None else mask)
        head = DFlashHead(size, read_layers(layers), block)
    else:
        head = Eagle3Head(size, read_layers(layers), config.hidden_size)
    head.embed_tokens.weight = target.get_input_embeddings().weight
    output = target.get_output_embeddings().weight
    if not isinstance(head, Eagle3Head):  # which is the only one with its own
        head.lm_head.weight = output
        return head
    if size.draft_vocab_size < size.vocab_size:
        often = torch.bincount(tokens.flatten(), minlength=size.vocab_size).argsort(descending=True)
        chosen = often[: size.draft_vocab_size].sort().values
        head.d2t.copy_(chosen - torch.arange(len(chosen)))
        output = output[chosen]
    head.lm_head.weight.data.copy_(output)
    return head


def kind_shape(args: argparse.Namespace) -> dict[str, Any]:
    """Return in what the head's config.json differs from the target's."""
    found: dict[str, Any] = {
        "model_type": "llama" if args.kind == "eagle3" else "qwen3",
        "num_hidden_layers": args.layers,
        "attention_bias": False,
        "partial_rotary_factor": 1.0,
    }
    if args.intermediate:
        found["intermediate_size"] = args.intermediate
    if args.draft_vocab:
        found["draft_vocab_size"] = args.draft_vocab
    return found


def read_layers(layers: int) -> list[int]:
    """Return three layers of the target to read: a low, a middle and a high one."""
    ids = sorted({min(2, layers - 1), layers // 2, max(1, layers - 1)})
    while len(ids) < 3:
        ids = sorted({*ids, next(i for i in range(1, layers + 1) if i not in ids)})
    return ids


class UnrolledPass:
    """Lets all rows of a batch draft at once: see `unrolled_loss`.

    seen: keys and values of each draft step so far
    """

    def __init__(self, batch: int, rows: int) -> None:
        self._shape = (batch, rows)
        self._seen: list[tuple[Tensor, Tensor]] = []

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return what each row finds: see `Attend`."""
        rows, dim, groups = self._shape[1], q.shape[-1], q.shape[1] // k.shape[1]
        q, k, v = (y.view(*self._shape, -1, dim).transpose(1, 2) for y in (q, k, v))
        self._seen.append((k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)))
        (first, values), own = self._seen[0], self._seen[1:]
        hidden = torch.ones(rows, rows, dtype=torch.bool).triu(1)
        scores = [(q @ first.transpose(-1, -2)).masked_fill(hidden, -math.inf)]
        scores += [(q * keys).sum(-1, keepdim=True) for keys, _ in own]
        shares = (torch.cat(scores, -1) * dim**-0.5).softmax(-1)
        mixed = shares[..., :rows] @ values
        for i, (_, value) in enumerate(own):
            mixed = mixed + shares[..., rows + i, None] * value
        return mixed.transpose(1, 2).flatten(0, 1)


def unrolled_loss(head: Eagle3Head | MTPHead, target: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Return the cross entropy to the target's distribution, over the draft steps.

    In draft step s, row i has the pair of token i + 1 + s. It sees the pairs of rows up to i that
    the target has read, and of its own row those of the draft steps before.
    """
    states, logits = look(head, target, tokens)
    ids = slice(None)
    if isinstance(head, Eagle3Head):
        ids = torch.arange(len(head.d2t)) + head.d2t
    goal = logits[..., ids].softmax(-1)
    batch, rows = len(tokens), tokens.shape[1] - 1 - UNROLLED
    x = head.reduce(states[:, :rows].flatten(0, 1))
    attend, losses = UnrolledPass(batch, rows), []
    for s in range(UNROLLED):
        positions = torch.arange(1 + s, 1 + s + rows).repeat(batch)
        x = head(tokens[:, 1 + s : 1 + s + rows].flatten(), x, positions, attend)
        drafted = head.logits(x)[:, ids]
        losses.append(
            functional.cross_entropy(drafted, goal[:, 1 + s : 1 + s + rows].flatten(0, 1))
        )
    return weighted(losses, DECAY)


class AnchoredPass:
    """Lets blocks that begin at anchors look at the context before them, and at themselves.

    context: keys and values in each layer, [B * length, kv heads, D]
    allowed: [B, 1, rows of blocks, length + rows of blocks]
    """

    def __init__(self, context: list[tuple[Tensor, Tensor]], allowed: Tensor) -> None:
        self._context, self._allowed = context, allowed

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return what each row finds: see `Attend`."""
        batch = len(self._allowed)

        def split(y: Tensor) -> Tensor:
            return y.view(batch, -1, *y.shape[1:]).transpose(1, 2)

        keys, values = (
            torch.cat([split(c), split(own)], 2)
            for c, own in zip(self._context[layer], (k, v), strict=True)
        )
        found = functional.scaled_dot_product_attention(
            split(q), keys, values, attn_mask=self._allowed, enable_gqa=True
        )
        return found.transpose(1, 2).flatten(0, 1)


def block_loss(head: DFlashHead, target: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Return the cross entropy to the target's distribution, over blocks that begin anywhere."""
    states, logits = look(head, target, tokens)
    (batch, length), size = tokens.shape, head.block.size
    anchors = 1 + torch.rand(batch, length - size).argsort(-1)[:, :ANCHORS]
    places = (anchors[..., None] + torch.arange(size)).flatten(1)  # [B, rows]
    blocks = torch.full_like(places, head.block.mask_token_id)
    blocks[:, ::size] = tokens.gather(1, anchors)
    begins = anchors.repeat_interleave(size, 1)[..., None]
    before = torch.arange(length) < begins
    same = begins == anchors.repeat_interleave(size, 1)[:, None]
    context = head.context(head.reduce(states.flatten(0, 1)), torch.arange(length).repeat(batch))
    attend = AnchoredPass(context, torch.cat([before, same], -1)[:, None])
    x = head(blocks.flatten(), places.flatten(), attend)
    # the state before a token has the target's distribution of it
    goal = logits.softmax(-1)[torch.arange(batch)[:, None], places - 1]
    drafted = head.logits(x).view(batch, -1, size, logits.shape[-1])
    goal = goal.view(drafted.shape)
    losses = [
        functional.cross_entropy(drafted[:, :, j].flatten(0, 1), goal[:, :, j].flatten(0, 1))
        for j in range(1, size)
    ]
    return weighted(losses, DECAY)


@torch.no_grad()
def look(head: AnyHead, target: PreTrainedModel, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the states that the head reads, [B, length, layers, H], and the target's logits."""
    out = target(tokens, output_hidden_states=True)
    return torch.stack([out.hidden_states[i] for i in head.hidden_layers], 2), out.logits


def weighted(losses: list[Tensor], decay: float) -> Tensor:
    """Return the mean of losses; each counts `decay` times as much as the one before it."""
    weights = [decay**s for s in range(len(losses))]
    return torch.stack([w * x for w, x in zip(weights, losses, strict=True)]).sum() / sum(weights)


def save(
    head: AnyHead, target: PreTrainedModel, args: argparse.Namespace, losses: list[float]
) -> None:
    """Write the head. EAGLE-3 and DFlash are written in both formats, speculators' beside SGLang's.

    An MTP head with a directory of its own has no format in SGLang: it is written as speculators
    does.
    """
    shared = {"embed_tokens.weight"} | ({"lm_head.weight"} if args.kind != "eagle3" else set())
    weights = {n: w.detach() for n, w in head.state_dict().items() if n not in shared}
    if args.kind != "eagle3":
        weights.pop("d2t", None)
    small = {n: w if n == "d2t" else w.half().contiguous() for n, w in weights.items()}
    if args.kind == "eagle3":
        small["t2d"] = torch.zeros(head.config.vocab_size, dtype=torch.bool)
        small["t2d"][torch.arange(len(head.d2t)) + head.d2t] = True
    for folder, config in configs(head, target, args).items():
        folder.mkdir(parents=True, exist_ok=True)
        named = {rename(n, args.kind, config): w for n, w in small.items()}
        save_file(named, folder / "model.safetensors", {"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    size = sum(w.numel() for n, w in weights.items() if n != "d2t")
    title = {"eagle3": "EAGLE-3", "mtp": "MTP", "dflash": "DFlash"}[args.kind]
    (args.out / "README.md").write_text(
        f"# {title} head for {args.model.name}\n\n{size:,} parameters, reads layers "
        f"{list(head.hidden_layers)} (as Transformers counts). Made by `scripts/train_head.py` in "
        f"{len(losses):,} steps; loss {losses[-1] if losses else math.nan:.3f}. For tests and "
        "small models.\n"
    )


def rename(name: str, kind: str, config: dict[str, Any]) -> str:
    """Return the name of a tensor in the format of this config.json."""
    if kind == "eagle3" and "speculators_model_type" in config:
        return name.replace("midlayer.", "layers.0.")
    if kind != "mtp":
        return name
    theirs = {"enorm": "token_layernorm", "hnorm": "hidden_layernorm", "eh_proj": "input_proj",
              "norm": "final_layernorm"}  # fmt: skip
    first, _, rest = name.partition(".")
    return f"mtp_layers.0.{rest if first == 'layer' else f'{theirs[first]}.{rest}'}"


def configs(
    head: AnyHead, target: PreTrainedModel, args: argparse.Namespace
) -> dict[Path, dict[str, Any]]:
    """Return the config.json of each directory to write."""
    kept = (
        "hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim hidden_act "
        "rms_norm_eps rope_parameters max_position_embeddings vocab_size attention_bias model_type "
        "num_hidden_layers"
    )
    whole = {**target.config.to_dict(), **kind_shape(args)}
    shape = {name: whole[name] for name in kept.split() if name in whole}
    method = {"proposal_type": "greedy", "speculative_tokens": UNROLLED}
    sglang: dict[str, Any] = {**shape, "torch_dtype": "float16", "tie_word_embeddings": False}
    sglang["rope_theta"] = head.config.theta  # SGLang 0.5.11 looks here
    speculators: dict[str, Any] = {
        "speculators_model_type": args.kind, "speculators_version": "0.9.0",
        "transformer_layer_config": shape,
    }  # fmt: skip
    ids = list(head.hidden_layers)
    if isinstance(head, Eagle3Head):
        nested = {"use_aux_hidden_state": True,
                  "eagle_aux_hidden_state_layer_ids": [i - 1 for i in ids]}  # fmt: skip
        vocabulary = {"draft_vocab_size": head.config.draft_vocab_size}
        sglang |= {
            "architectures": ["LlamaForCausalLMEagle3"],
            "eagle_config": nested,
            **vocabulary,
        }
        speculators |= {"architectures": ["Eagle3Speculator"], **vocabulary,
                        "eagle_aux_hidden_state_layer_ids": ids}  # fmt: skip
    elif isinstance(head, DFlashHead):
        block, mask = head.block.size, head.block.mask_token_id
        nested = {"mask_token_id": mask, "target_layer_ids": [i - 1 for i in ids]}
        sglang |= {"architectures": ["DFlashDraftModel"], "block_size": block,
                   "num_target_layers": target.config.num_hidden_layers,
                   "dflash_config": nested}  # fmt: skip
        speculators |= {"architectures": ["DFlashSpeculator"], "block_size": block,
                        "mask_token_id": mask, "aux_hidden_state_layer_ids": ids,
                        "draft_vocab_size": head.config.vocab_size}  # fmt: skip
        method["speculative_tokens"] = block - 1
    else:
        speculators |= {"architectures": ["MTPDraftModel"], "num_nextn_predict_layers": 1}
    speculators["speculators_config"] = {
        "algorithm": args.kind, "default_proposal_method": "greedy", "proposal_methods": [method],
        "verifier": {"name_or_path": args.model.name,
                     "architectures": target.config.architectures},
    }  # fmt: skip
    if args.kind == "mtp":
        return {args.out: speculators}
    return {args.out: sglang, args.out / "speculators": speculators}


def plot(losses: list[float], path: Path) -> None:
    """Draw the loss, each step and its running mean; say so if matplotlib is missing."""
    if find_spec("matplotlib") is None:
        print("no picture of the loss: pip install 'outrider[tools]' brings matplotlib")
        return
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "outrider", "svg.fonttype": "none"}
    from matplotlib import pyplot as plt

    means = [sum(part) / len(part) for part in (losses[max(0, i - 49) : i + 1]
                                                for i in range(len(losses)))]  # fmt: skip
    figure, axes = plt.subplots(figsize=(6, 3))
    axes.plot(losses, color="#bbbbbb", linewidth=0.5, label="step")
    axes.plot(means, color="#1f77b4", label="mean of 50")
    axes.set(xlabel="step", ylabel="cross entropy", ylim=(0, None))
    axes.legend(frameon=False)
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    main()
