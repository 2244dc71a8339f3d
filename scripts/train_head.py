"""Train an EAGLE-3 head for a small model: for tests, for narrow domains, to see how it works.

    python scripts/train_head.py MODEL --out HEAD [--text FILE ...] [--steps 2000]

The head learns the target's own distribution on texts: those of `--text`, or ones that the target
writes itself. It is unrolled: after the first token it reads its own states, as it does when it
drafts. Run again with the same `--out`, training goes on where it stopped. A head for production
wants far more text and a GPU: use SpecForge or speculators, whose formats Outrider reads.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch
from rich.progress import track
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from outrider.drafters.heads import Eagle3Head, HeadConfig
from outrider.drafters.heads.layers import rotate

UNROLLED, DECAY = 4, 0.8
"""Draft steps in training, and the weight of each one against the one before it."""


def main() -> None:
    """Train, or go on training, and write the head in both formats."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--text", type=Path, nargs="+", default=[])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=96, help="tokens of a piece of text")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    target = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    tokens = read(target, args.model, args.text, args.length)
    head = new_head(target)
    state = args.out / "training.pt"
    optimizer = torch.optim.AdamW(head.parameters(), args.rate, betas=(0.9, 0.95))
    done, losses = 0, []
    if state.exists():
        kept = torch.load(state, weights_only=True)
        head.load_state_dict(kept["head"])
        optimizer.load_state_dict(kept["optimizer"])
        done, losses = kept["done"], kept["losses"]
    for step in track(range(done, args.steps), "training"):
        for group in optimizer.param_groups:
            group["lr"] = args.rate * 0.5 * (1 + math.cos(math.pi * step / args.steps))
        picked = tokens[torch.randint(len(tokens), (args.batch,))]
        loss = unrolled_loss(head, target, picked)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if (step + 1) % 250 == 0 or step + 1 == args.steps:
            args.out.mkdir(parents=True, exist_ok=True)
            kept = {"head": head.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**kept, "done": step + 1, "losses": losses}, state)
    save(head, target, args.out, args.model, losses)
    print(f"wrote {args.out}; loss {sum(losses[-50:]) / max(1, len(losses[-50:])):.3f}")


@torch.inference_mode()
def read(target: PreTrainedModel, path: Path, texts: list[Path], length: int) -> Tensor:
    """Return pieces of text as tokens, [pieces, length]."""
    if texts:
        tokenizer = AutoTokenizer.from_pretrained(path)
        ids = [i for text in texts for i in tokenizer.encode(text.read_text("utf-8"))]
        return torch.tensor(ids).unfold(0, length, 16)
    start = target.config.bos_token_id or 0
    written = [
        target.generate(
            torch.full((64, 1), start), do_sample=True, temperature=temperature,
            min_new_tokens=2 * length, max_new_tokens=2 * length, pad_token_id=start,
        )
        for temperature in track([0.3, 0.6, 0.8, 1.0] * 4, "the target writes")
    ]  # fmt: skip
    # pieces begin anywhere: a head that only ever saw beginnings knows nothing else
    return torch.cat(written).unfold(1, length, 16).flatten(0, 1).clone()


def new_head(target: PreTrainedModel) -> Eagle3Head:
    """Return an untrained head. It shares the target's embedding, and begins with its output."""
    config, layers = target.config, target.config.num_hidden_layers
    ids = sorted({min(2, layers - 1), layers // 2, max(1, layers - 1)})
    while len(ids) < 3:
        ids = sorted({*ids, next(i for i in range(1, layers + 1) if i not in ids)})
    head = Eagle3Head(HeadConfig.of(config.to_dict()), ids, config.hidden_size)
    head.embed_tokens.weight = target.get_input_embeddings().weight
    head.embed_tokens.weight.requires_grad_(False)
    head.lm_head.weight.data.copy_(target.get_output_embeddings().weight)
    return head


def unrolled_loss(head: Eagle3Head, target: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Return the cross entropy to the target's distribution, over the draft steps.

    In draft step s, row i has the pair of token i + 1 + s. It sees the pairs of rows up to i that
    the target has read, and of its own row those of the draft steps before.
    """
    with torch.no_grad():
        out = target(tokens, output_hidden_states=True)
        states = torch.stack([out.hidden_states[i] for i in head.hidden_layers], 2)
        goal = out.logits.softmax(-1)
    rows = tokens.shape[1] - 1 - UNROLLED
    x = head.fc(states[:, :rows].flatten(2))
    seen: list[tuple[Tensor, Tensor]] = []
    losses = []
    for s in range(UNROLLED):
        x = _pass(head, tokens[:, 1 + s : 1 + s + rows], x, s, seen)
        logits = head.lm_head(head.norm(x))
        picked = goal[:, 1 + s : 1 + s + rows]
        losses.append(functional.cross_entropy(logits.flatten(0, 1), picked.flatten(0, 1)))
    weights = [DECAY**s for s in range(UNROLLED)]
    return torch.stack([w * loss for w, loss in zip(weights, losses, strict=True)]).sum() / sum(
        weights
    )


def _pass(
    head: Eagle3Head, tokens: Tensor, x: Tensor, step: int, seen: list[tuple[Tensor, Tensor]]
) -> Tensor:
    """Return g of all rows at once, [B, rows, H]; adds this step's keys and values to `seen`."""
    layer, config = head.midlayer, head.config
    batch, rows, _ = x.shape
    groups = config.num_heads // config.num_kv_heads
    both = torch.cat([layer.input_layernorm(head.embed_tokens(tokens)), layer.hidden_norm(x)], -1)
    angles = torch.arange(1 + step, 1 + step + rows)[:, None].float() * head.frequencies
    angles = angles.repeat(batch, 1)
    flat, shape = both.flatten(0, 1), (batch * rows, -1, config.head_dim)

    def split(y: Tensor) -> Tensor:
        return y.view(batch, rows, -1, config.head_dim).transpose(1, 2)

    q = split(rotate(layer.self_attn.q_proj(flat).view(shape), angles))
    k = split(rotate(layer.self_attn.k_proj(flat).view(shape), angles))
    v = split(layer.self_attn.v_proj(flat).view(shape))
    seen.append((k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)))
    (first, values), own = seen[0], seen[1:]
    scale = config.head_dim**-0.5
    hidden = torch.ones(rows, rows, dtype=torch.bool).triu(1)
    scores = [(q @ first.transpose(-1, -2) * scale).masked_fill(hidden, -math.inf)]
    scores += [(q * keys).sum(-1, keepdim=True) * scale for keys, _ in own]
    shares = torch.cat(scores, -1).softmax(-1)
    mixed = shares[..., :rows] @ values
    for i, (_, value) in enumerate(own):
        mixed = mixed + shares[..., rows + i, None] * value
    h = x + layer.self_attn.o_proj(mixed.transpose(1, 2).flatten(2))
    found: Tensor = h + layer.mlp(layer.post_attention_layernorm(h))
    return found


def save(
    head: Eagle3Head, target: PreTrainedModel, out: Path, model: Path, losses: list[float]
) -> None:
    """Write the head as SpecForge does, and beside it, in `speculators/`, as speculators does."""
    weights = {n: w.detach() for n, w in head.state_dict().items() if n != "embed_tokens.weight"}
    small = {n: w if n == "d2t" else w.half().contiguous() for n, w in weights.items()}
    small["t2d"] = torch.ones(head.config.vocab_size, dtype=torch.bool)
    shape = target.config.to_dict()
    kept = (
        "hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim hidden_act "
        "rms_norm_eps rope_parameters max_position_embeddings vocab_size attention_bias"
    )
    shape = {name: shape[name] for name in kept.split() if name in shape}
    specforge = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
        **shape, "draft_vocab_size": head.config.draft_vocab_size, "torch_dtype": "float16",
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [i - 1 for i in head.hidden_layers],
        },
    }  # fmt: skip
    verifier = {"name_or_path": model.name, "architectures": target.config.architectures}
    method = {"proposal_type": "greedy", "speculative_tokens": UNROLLED}
    speculators = {
        "speculators_model_type": "eagle3", "speculators_version": "0.3.0",
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": head.config.draft_vocab_size,
        "eagle_aux_hidden_state_layer_ids": list(head.hidden_layers),
        "transformer_layer_config": {"model_type": "llama", "num_hidden_layers": 1, **shape},
        "speculators_config": {
            "algorithm": "eagle3", "default_proposal_method": "greedy",
            "proposal_methods": [method], "verifier": verifier,
        },
    }  # fmt: skip
    for folder, config in ((out, specforge), (out / "speculators", speculators)):
        folder.mkdir(parents=True, exist_ok=True)
        names = {n: n.replace("midlayer.", "layers.0.") if folder != out else n for n in small}
        save_file({names[n]: w for n, w in small.items()}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    size = sum(w.numel() for n, w in weights.items() if n != "d2t")
    (out / "README.md").write_text(
        f"# EAGLE-3 head for {model.name}\n\n{size:,} parameters, reads layers "
        f"{list(head.hidden_layers)} (as Transformers counts). Made by `scripts/train_head.py` in "
        f"{len(losses):,} steps; loss {losses[-1] if losses else math.nan:.3f}. For tests and "
        "small models. The same in the format of speculators: `speculators/`.\n"
    )


if __name__ == "__main__":
    main()
