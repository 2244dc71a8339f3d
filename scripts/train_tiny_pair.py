"""Train the tiny draft/target pair that ships with Outrider.

Makes, from nothing but this file: short stories written by a template grammar, a 512-token
byte-level BPE tokenizer, a Llama target of about 0.8 M parameters and a GPT-2 draft about ten
times smaller that shares only the tokenizer with it. Takes about ten minutes on one CPU core;
the same seed gives the same text and, on one machine, the same weights.

    python scripts/train_tiny_pair.py --out src/outrider/assets/tiny
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
from pathlib import Path
from typing import NamedTuple

import torch
import transformers as hf
from rich.progress import track
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END = "<|endoftext|>"
VOCAB_SIZE = CONTEXT = 512
BATCH_TOKENS = 1536
HELD_OUT = 100


class Recipe(NamedTuple):
    name: str
    steps: int
    peak: float
    early_window: int


# One rule a line (longer ones go on, indented), alternatives split by "|", "/" ends a text line.
# [spot] picks afresh each time; [spot1] is picked once a story and is never the same as [spot2];
# [why=state1] follows the rule named "why " plus what state1 is in this story.
GRAMMAR = """
story: [opening] [load] [orders]//[ride] [mood]//[report] [passing]//[ending]
    | [opening] [load] [orders]//[ride]//[report]//[ledger]//[ending]
    | [opening] [load] [orders]//[ride] [meeting]//[report]//[ending]
    | [opening] [load] [orders]//[meeting] [ride]//[report] [passing] [close]
opening: Once there was an outrider called [rider1]. [rider1] had a [mount] called [horse1], and
      [horse1] was never late. On a [weather] [time], [rider1] and [horse1] rode out of [town1].
    | On a [weather] [time], an outrider rode out of [town1]. The outrider of [town1] was [rider1],
      and [rider1] had a [mount] called [horse1]. [horse1] was never late.
    | It was a [weather] [time] in [town1]. The best outrider of [town1] was called [rider1], and
      [rider1] rode on [horse1]. [horse1] was a [mount].
load: Behind [horse1] came a [paint1] carriage. In the [paint1] carriage sat a [guest1], and the
      [guest1] was going to [town2]. It was far to [town2]. "I have [goods]," said the [guest1].
    | Behind [rider1] came a [paint1] carriage, and on the [paint1] carriage were [goods]. A
      [guest1] was taking the [goods] to [town2], for the [guest1] had a letter from [town2].
goods: [good1], [good2] and [good3]
orders: The coachman was [driver1]. "[advice1]," said [driver1] to [rider1].
    | "What shall I look for, [driver1]?" asked [rider1]. "[advice1]," said [driver1] the coachman.
ride: So [rider1] and [horse1] came to a [spot1]. The [spot1] was [state1], for [why=state1]. [then]
      [rider1] and [horse1] came to a [spot2]. The [spot2] was [state2], for [why=state2].
    | First [rider1] saw a [spot1], and the [spot1] was [state1], for [why=state1]. [then] [rider1]
      saw a [spot2], and the [spot2] was [state2], for [why=state2].
then: After a mile | Beyond the trees | Round the bend | Then
mood: [horse1] stopped, and [rider1] and [horse1] heard the [sound]. | A [bird] sang to [rider1].
    | [rider1] ate an apple, and [horse1] ate the core. | The air smelled of [smell].
meeting: By the road [rider1] met a [guest2]. "Is it far to [town2]?" asked the [guest2]. "It is
      [number] miles to [town2]," said [rider1].
    | By the road stood a [guest2] who had lost a [lost1]. "I saw a [lost1] at the inn," said
      [rider1], and the [guest2] went to fetch the [lost1].
report: [turn] "What did you find, [rider1]?" asked [driver1]. "The [spot1] is [state1], and the
      [spot2] is [state2]," said [rider1]. [trust]
turn: So [rider1] and [horse1] rode back to the [paint1] carriage.
    | Soon [rider1] saw the [paint1] carriage.
trust: And [driver1] shook the reins. | "Then let us see," said [driver1].
    | "Well ridden, [rider1]," said the [guest1].
passing: At the [spot1], [fix=state1]. At the [spot2], [fix=state2].
ledger: The keeper wrote in the ledger:/- rider: [rider1]/- horse: [horse1]/- carriage: [paint1]/-
      [spot1]: [state1]/- [spot2]: [state2]/- toll: [number] pennies
    | The keeper wrote in the ledger:/- from: [town1]/- to: [town2]/- rider: [rider1]/-
      [spot1]: [state1]/- [spot2]: [state2]/- cargo: [goods]
ending: [arrive] The keeper of the inn counted [goods], and nothing was missing. [close]
    | [arrive] "Here are my [goods], all safe and dry," said the [guest1]. [close]
    | [arrive] The [guest1] unpacked the [goods], and gave [horse1] a [treat]. [close]
arrive: At [hour] the [paint1] carriage came to [town2]. | They were in [town2] before [hour].
    | The bells of [town2] rang for the [paint1] carriage.
close: And [rider1] remembered what [driver1] had said: "[advice1]."
    | "[advice1]," said [driver1] again, and [rider1] laughed.
    | Then [rider1] brushed [horse1], and [rider1] and [horse1] slept until morning.
    | In the morning [rider1] and [horse1] rode ahead once more.
advice: Ride ahead, and tell me what you have seen | Guess, but let me check every bridge
    | A good guess saves an hour, and a bad guess costs a minute
    | Keep what is true, and turn back at the first mistake
    | Never ride further than I can follow | Trust your horse when the fog comes down
    | Look twice at the water and once at the sky
state: clear | clear | clear | clear | flooded | icy | closed | muddy | blocked | full of sheep
why clear: nobody had passed all day | the weather had been kind
why flooded: the river had risen in the night | it had rained for three days
why icy: the night had been cold | the frost had not melted
why closed: the keeper was at a wedding | the mason was mending it
why muddy: the carts had churned it | the rain had made it soft
why blocked: an oak had come down in the storm | a cart had lost a wheel
why full of sheep: it was market day | the shepherd was asleep
fix clear: the wheels rolled on without a sound | they did not even slow down
fix flooded: they waited for the water to fall | they took the high road
fix icy: they spread straw under the wheels | they walked the horses slowly
fix closed: they found the keeper with the key | they went round by the mill
fix muddy: they laid down planks | they all got out and pushed
fix blocked: six men cleared the way | they cut a new path with the axe
fix full of sheep: the shepherd called the sheep away | they waited for the last lamb
weather: bright | grey | windy | cold | rainy | warm | misty | golden | snowy | stormy
time: morning | evening | afternoon | day in spring | day in autumn | day in winter
town: Harrow | Norton | Kelso | Ashby | Dale | Linton | Stow | Marsh
rider: Wren | Nell | Ada | Ivy | Tess | Ned | Hugo | Sam | Finn | Max
driver: Old Tom | Old Bram | Big Walt | Mr. Pym | Mr. Hobb
horse: Comet | Clover | Pip | Star | Hazel | Dusty
mount: brown mare | black mare | white pony | grey pony | spotted mare
paint: red | green | blue | yellow | black | silver
guest: farmer | baker | painter | judge | weaver | poet | teacher | miller
good: honey | lemons | cider | nails | cloth | flour | eggs | candles | cheese | tea
spot: bridge | ford | pass | lane | crossing | ferry
sound: church bells | mill wheel | wind | river | geese
bird: crow | robin | magpie | heron | thrush
smell: rain | hay | smoke | apples | warm bread
lost: hat | goat | map | kite | glove
treat: carrot | pear | lump of sugar | bucket of oats
hour: noon | dusk | six o'clock | supper | midnight | sunset
number: two | three | four | five | six | seven | eight | nine
"""
NAMED = ["town", "rider", "driver", "horse", "paint", "guest", "good", "spot"]
RULES = {
    name: re.sub(r"\s+", " ", body).split(" | ")
    for name, body in re.findall(r"^(\w[\w ]*): (.*(?:\n +.*)*)", GRAMMAR, flags=re.MULTILINE)
}


def expand(symbol: str, rng: random.Random, kept: dict[str, str]) -> str:
    """Expand one grammar symbol; `kept` holds this story's numbered choices."""
    if symbol in kept:
        return kept[symbol]
    rule, _, key = symbol.partition("=")
    name = f"{rule} {expand(key, rng, kept)}" if key else rule.rstrip("123")
    numbered = not key and name != symbol
    options = list(RULES[name])
    for other, taken in kept.items():
        if numbered and other.rstrip("123") == name:
            options.remove(taken)
    text = re.sub(r"\[(.+?)\]", lambda m: expand(m[1], rng, kept), rng.choice(options))
    if numbered:
        kept[symbol] = text
    return text


def write_story(rng: random.Random) -> str:
    return re.sub("/ ?", "\n", expand("story", rng, {}))


def train_tokenizer(stories: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    # Seen this often, nearly every name becomes one token, so copying it is one prediction.
    names = [f" {word}" for rule in NAMED for text in RULES[rule] for word in text.split()]
    tokenizer.train_from_iterator(stories + names * len(stories), trainer)
    return tokenizer


def make_models() -> tuple[hf.PreTrainedModel, hf.PreTrainedModel]:
    shared = {"vocab_size": VOCAB_SIZE, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    target = hf.LlamaConfig(
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        initializer_range=0.06,
        **shared,
    )
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    draft = hf.GPT2Config(
        n_embd=48, n_layer=1, n_head=4, n_positions=CONTEXT, **no_dropout, **shared
    )
    return hf.LlamaForCausalLM(target), hf.GPT2LMHeadModel(draft)


def loss_of(model: hf.PreTrainedModel, windows: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=windows[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def train(model: hf.PreTrainedModel, tokens: torch.Tensor, recipe: Recipe, seed: int) -> float:
    """Train on windows of packed stories; return the mean loss of the last fifty steps."""
    generator = torch.Generator().manual_seed(seed)
    last = len(tokens) - CONTEXT
    story_starts = (tokens[: last - 1] == 0).nonzero().flatten() + 1
    steps, warm_up = recipe.steps, min(100, recipe.steps // 10)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.peak, betas=(0.9, 0.98), weight_decay=0.05
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / (warm_up + 1), 0.5 + 0.5 * math.cos(math.pi * step / steps)),
    )
    losses = []
    for step in track(range(steps), description=f"training {recipe.name}"):
        width = recipe.early_window if step < 0.7 * steps else CONTEXT
        rows = BATCH_TOKENS // width
        starts = torch.randint(last, (rows,), generator=generator)
        # Half of the windows begin with a story, as prompts do.
        chosen = torch.randint(len(story_starts), (rows // 2,), generator=generator)
        starts[: rows // 2] = story_starts[chosen]
        loss = loss_of(model, torch.stack([tokens[s : s + width + 1] for s in starts]))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        losses.append(loss.item())
    return sum(losses[-50:]) / len(losses[-50:])


def save(model: hf.PreTrainedModel, tokenizer: Tokenizer, folder: Path) -> None:
    model.half().save_pretrained(folder)
    # safetensors makes the file private to its owner, and a wheel would keep that.
    (folder / "model.safetensors").chmod(0o644)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        # transformers 5 would write a class name here that transformers 4 does not know.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        **dict.fromkeys(("bos_token", "eos_token", "pad_token"), END),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


@torch.no_grad()
def report(folder: Path, held_out: list[str], openings: int = 10, prompt: int = 24) -> None:
    """Print what the saved pair does on stories that it was not trained on."""
    tokenizer = hf.AutoTokenizer.from_pretrained(folder / "target")
    target, draft = (
        hf.AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32)
        for name in ("target", "draft")
    )
    ids = torch.tensor(tokenizer(END.join(held_out))["input_ids"])
    windows = ids[: 32 * CONTEXT].view(-1, CONTEXT)
    for name, model in (("target", target), ("draft", draft)):
        loss = loss_of(model, windows).item()
        print(f"{name}: {model.num_parameters():,} parameters, held-out loss {loss:.3f}")
    agreed = written = 0
    for story in held_out[:openings]:
        opening = tokenizer(story, return_tensors="pt")["input_ids"][:, :prompt]
        text = target.generate(opening, max_new_tokens=100, do_sample=False)
        guesses = draft(text).logits.argmax(-1)[:, prompt - 1 : -1]
        agreed += int((guesses == text[:, prompt:]).sum())
        written += guesses.numel()
    print(f"greedy acceptance: {agreed / written:.3f} of {written} target tokens")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the tiny pair that ships with Outrider.")
    parser.add_argument("--out", type=Path, default=Path("src/outrider/assets/tiny"))
    parser.add_argument("--steps", type=int, default=3000, help="training steps of the target")
    parser.add_argument("--draft-steps", type=int, default=1500)
    parser.add_argument("--stories", type=int, default=2200, help="how many stories to write")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    hf.logging.set_verbosity_error()
    hf.logging.disable_progress_bar()
    torch.set_num_threads(1)  # the order of sums, and so the weights, would change with more
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    stories = [write_story(rng) for _ in range(args.stories)]
    held_out, stories = stories[:HELD_OUT], stories[HELD_OUT:]
    tokenizer = train_tokenizer(stories)
    tokens = torch.tensor(tokenizer.encode(END + END.join(stories)).ids)
    print(f"{sum(map(len, stories)) / 1e6:.2f} MB of stories, {len(tokens):,} tokens")
    target, draft = make_models()
    # The target starts with short windows: they are cheaper, and near repeats are learnt first.
    for model, recipe in (
        (target, Recipe("target", args.steps, 2e-3, early_window=192)),
        (draft, Recipe("draft", args.draft_steps, 5e-3, early_window=CONTEXT)),
    ):
        loss = train(model, tokens, recipe, args.seed)
        print(f"{recipe.name}: final training loss {loss:.3f}")
        save(model, tokenizer, args.out / recipe.name)
    report(args.out, held_out)


if __name__ == "__main__":
    main()
