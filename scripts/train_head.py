"""Train a head for a small model: for tests, for narrow domains, to see how it works.

    python scripts/train_head.py MODEL --out HEAD [--kind eagle3|mtp|dflash] [--text FILE ...]

The head learns the target's own distribution on texts: those of `--text`, or ones that the target
writes itself. EAGLE-3 and MTP are unrolled: after the first token the head reads its own states, as
it does when it drafts. DFlash fills in blocks that begin anywhere in the text. Run again with the
same `--out`, training goes on where it stopped. A head for production needs far more text and a
GPU: use SpecForge or speculators, whose formats Outrider reads.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import torch
from head_files import kind_shape, save
from head_losses import UNROLLED, AnyHead, block_loss, unrolled_loss
from rich.progress import track
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from outrider.clients import load_model, load_tokenizer
from outrider.drafters.heads import (
    Block,
    DFlashHead,
    Eagle3Head,
    Eagle3Norms,
    HeadConfig,
    MTPHead,
)
from outrider.errors import Unsupported

STRIDE = 16
"""So many tokens lie between the beginnings of two pieces of text."""

WARM_UP = 0.05
"""The share of the steps in which the learning rate rises."""

SAVE_EVERY = 60.0
"""Seconds of training that are lost at most if it is interrupted."""


class CannotTrainError(Exception):
    """Something that the user gave is missing or does not fit; the message says what."""


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
    parser.add_argument("--fc-norm", action="store_true",
                        help="normalise the target's states first: EAGLE-3.1 (eagle3)")  # fmt: skip
    parser.add_argument("--intermediate", type=int, help="width of the MLP; the target's if unset")
    parser.add_argument("--layers", type=int, default=1, help="of the head (dflash)")
    parser.add_argument("--block", type=int, default=8, help="tokens of a block (dflash)")
    parser.add_argument("--mask-token", type=int, metavar="ID",
                        help="stands for a draft (dflash); the padding token if unset")  # fmt: skip
    parser.add_argument("--save-at", type=int, nargs="+", default=[], metavar="STEP",
                        help="write OUT/step-STEP too, the head after so many steps")  # fmt: skip
    args = parser.parse_args()
    try:
        run(args)
    except CannotTrainError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")


def run(args: argparse.Namespace) -> None:
    """Train as the options say."""
    if problem := problem_with(args):
        raise CannotTrainError(problem)
    logging.disable_progress_bar()
    logging.set_verbosity_error()  # it warns of long texts, which are read in pieces here
    torch.manual_seed(args.seed)
    target = load(args.model)
    tokens = read(target, args.model, args.text, args.length)
    if not len(tokens):
        raise CannotTrainError(
            f"--text has fewer than {args.length} tokens: give more, or a smaller --length"
        )
    head = new_head(target, tokens, args)
    losses = train(head, target, tokens, args)
    save(head, target, args, losses, args.out)
    plot(losses, args.out / "loss.svg")
    print(f"wrote {args.out}; loss {sum(losses[-50:]) / max(1, len(losses[-50:])):.3f}")


def load(path: Path) -> PreTrainedModel:
    """Return the target, which is not trained."""
    try:
        target: PreTrainedModel = load_model(str(path), torch.float32)
    except Unsupported as error:
        raise CannotTrainError(f"cannot load {path}: {error}") from error
    return target.requires_grad_(False)


def problem_with(args: argparse.Namespace) -> str | None:
    """Return what cannot be done, if anything."""
    if not (args.model / "config.json").is_file():
        return f"no model at {args.model}: name a directory with config.json and weights"
    for file in args.text:
        if not file.is_file():
            return f"no text at {file}"
    if args.draft_vocab is not None and (args.kind != "eagle3" or args.draft_vocab < 1):
        return "--draft-vocab is for --kind eagle3, and at least 1"
    if args.fc_norm and args.kind != "eagle3":
        return "--fc-norm is for --kind eagle3"
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
    losses = go_on(head, optimizer, args.out / "training.pt")
    began = saved = time.monotonic()
    done = len(losses)
    for step in track(range(done, args.steps), "training"):
        # a resumed run draws the same pieces as one that was not interrupted
        torch.manual_seed(args.seed * 1_000_003 + step)
        for group in optimizer.param_groups:
            group["lr"] = rate(step, args)
        loss = loss_of(head, target, tokens[torch.randint(len(tokens), (args.batch,))])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        losses.append(loss.item())
        if step + 1 in args.save_at:
            save(head, target, args, losses, args.out / f"step-{step + 1}")
        if step + 1 == args.steps or time.monotonic() - saved > SAVE_EVERY:
            keep(head, optimizer, losses, args.out / "training.pt")
            saved = time.monotonic()
            speed = (len(losses) - done) * args.batch * args.length / (saved - began)
            print(f"step {step + 1}: loss {loss.item():.3f}, {speed:.0f} tokens/s")
            sys.stdout.flush()
    return losses


def rate(step: int, args: argparse.Namespace) -> float:
    """Return the learning rate of a step: it rises for a twentieth of the steps, then falls."""
    risen = min(1.0, (step + 1) / (args.steps * WARM_UP))
    fallen: float = 0.5 * (1 + math.cos(math.pi * step / args.steps))
    return args.rate * risen * fallen


def keep(head: AnyHead, optimizer: torch.optim.Optimizer, losses: list[float], state: Path) -> None:
    """Write what is needed to go on. An interruption leaves the file of before."""
    state.parent.mkdir(parents=True, exist_ok=True)
    new = state.with_suffix(".new")
    shared = {name for name, weight in head.named_parameters() if not weight.requires_grad}
    own = {name: weight for name, weight in head.state_dict().items() if name not in shared}
    kept = {"head": own, "optimizer": optimizer.state_dict()}
    torch.save({**kept, "done": len(losses), "losses": losses}, new)
    new.replace(state)


def go_on(head: AnyHead, optimizer: torch.optim.Optimizer, state: Path) -> list[float]:
    """Go on where training stopped, if it did. Return the loss of each step so far."""
    if not state.exists():
        return []
    kept = torch.load(state, weights_only=True)
    try:
        # what is the target's is not kept; a head of another shape or kind is refused
        head.load_state_dict({**head.state_dict(), **kept["head"]})
        optimizer.load_state_dict(kept["optimizer"])
    except (RuntimeError, ValueError) as error:
        raise CannotTrainError(
            f"{state} is of another head: use the options of that run, or another --out"
        ) from error
    losses: list[float] = kept["losses"]
    return losses


@torch.inference_mode()
def read(target: PreTrainedModel, path: Path, texts: list[Path], length: int) -> Tensor:
    """Return pieces of text as tokens, [pieces, length]."""
    if texts:
        tokenizer = load_tokenizer(str(path))
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
        norms = Eagle3Norms(fc_norm=args.fc_norm)
        head = Eagle3Head(size, read_layers(layers), config.hidden_size, norms)
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


def read_layers(layers: int) -> list[int]:
    """Return three layers of the target to read: a low, a middle and a high one."""
    ids = sorted({min(2, layers - 1), layers // 2, max(1, layers - 1)})
    while len(ids) < 3:
        ids = sorted({*ids, next(i for i in range(1, layers + 1) if i not in ids)})
    return ids


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
