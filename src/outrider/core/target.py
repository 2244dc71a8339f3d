"""The target's distribution: what plain decoding would draw from, at every row of a step.

One ordered list of transforms turns logits into the distribution. The ones that look back
(penalties, grammars) see each row's own path: the output so far and the drafts that lead to the
row. So a row inside a block gets the distribution that plain decoding would have after emitting
those drafts.

A draft model's logits go through the same list, to guess what the target's distribution will be.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.core.coins import Coins
from outrider.core.proposal import Proposal
from outrider.core.request import Request
from outrider.core.sampling import SamplingParams
from outrider.errors import NoToken


@dataclass(frozen=True)
class Rows:
    """Where each row of a pass stands.

    requests: [B]
    owners:   [N] the request of each row
    depths:   [N] how many drafts lead from the request's last token to the row
    paths:    those drafts, for each row; called only if some request looks back
    """

    requests: Sequence[Request]
    owners: Sequence[int]
    depths: Sequence[int]
    paths: Callable[[], Sequence[Sequence[int]]]

    @staticmethod
    def of(requests: Sequence[Request], proposal: Proposal) -> Rows:
        """Return the rows of a verify pass over `proposal`."""
        owners, depths = proposal.row_owners.tolist(), proposal.row_depths.tolist()
        return Rows(requests, owners, depths, proposal.paths)

    def sampling(self, row: int) -> SamplingParams:
        """Return what the row's request asked for."""
        return self.requests[self.owners[row]].sampling

    def where(self, wants: Callable[[SamplingParams], bool]) -> list[int]:
        """Return the rows whose request wants something."""
        wanted = [wants(request.sampling) for request in self.requests]
        return [row for row, owner in enumerate(self.owners) if wanted[owner]]

    def column(
        self, logits: Tensor, rows: list[int], value: Callable[[SamplingParams], float]
    ) -> Tensor:
        """Return one parameter of each of these rows, as a column beside their logits."""
        return logits.new_tensor([value(self.sampling(row)) for row in rows])[:, None]


@dataclass(frozen=True)
class TargetDistribution:
    """The distribution of the token after each row.

    logits:    [N, V] floating point; softmax(logits) is the distribution, except where `greedy`
    greedy:    [N] whether it is a point mass on the largest logit
    seeds:     [N] int64
    positions: [N] int64 the position of each row: the key of its coin
    """

    logits: Tensor
    greedy: tuple[bool, ...]
    seeds: Tensor
    positions: Tensor

    def draw(self, coins: Coins) -> Tensor:
        """Return the token that plain decoding emits after each row, [N] int64."""
        if not any(self.greedy):  # rows that are picked by a list are a copy to the device
            return coins.draw(self.logits, self.seeds, self.positions)
        tokens = self.logits.argmax(-1)
        rows = [row for row, greedy in enumerate(self.greedy) if not greedy]
        if rows:
            tokens[rows] = coins.draw(self.logits[rows], self.seeds[rows], self.positions[rows])
        return tokens

    def ranked(self, coins: Coins, count: int) -> Tensor:
        """Return what `draw` does, then what it would if that were impossible, and so on.

        -> [N, count] int64; fewer columns if there are not so many tokens
        """
        count = min(count, self.logits.shape[-1])
        if all(self.greedy):
            return self.logits.topk(count).indices
        guess, found = self, list[Tensor]()
        for _ in range(count):
            found.append(guess.draw(coins))
            logits = guess.logits.scatter(-1, found[-1][:, None], -math.inf)
            guess = replace(guess, logits=logits)
        return torch.stack(found, -1)

    def after(self, logits: Tensor) -> TargetDistribution:
        """Return the distribution one position further, with the same requests in these rows.

        logits: [N, V] of the distribution: see `transformed`
        """
        return replace(self, logits=logits, positions=self.positions + 1)

    def check(self, rows: Sequence[int]) -> None:
        """Raise NoToken if at one of these rows no token can follow: NaN, or all ruled out."""
        best = self.logits[list(rows)].amax(-1)
        greedy = torch.tensor([self.greedy[row] for row in rows], device=best.device)
        usable = torch.where(greedy, best > -math.inf, best.isfinite())
        if not bool(usable.all()):
            worst = best[~usable][0].item()
            why = "NaN or infinity among the logits" if worst != -math.inf else "all are ruled out"
            raise NoToken(f"no token can follow: {why}")

    def probs(self) -> Tensor:
        """Return p, [N, V]."""
        p = self.logits.softmax(-1)
        rows = [row for row, greedy in enumerate(self.greedy) if greedy]
        if rows:
            best = self.logits[rows].argmax(-1)
            p[rows] = torch.nn.functional.one_hot(best, p.shape[-1]).to(p.dtype)
        return p


def target_distribution(logits: Tensor, rows: Rows) -> TargetDistribution:
    """Return the distribution that plain decoding has after each row.

    logits: [N, V] as the model gave them; left as they are
    """
    owners = [rows.requests[owner] for owner in rows.owners]
    positions = [r.position + d for r, d in zip(owners, rows.depths, strict=True)]
    return TargetDistribution(
        logits=transformed(logits, rows),
        greedy=tuple(request.sampling.is_greedy for request in owners),
        seeds=torch.tensor([request.seed for request in owners], device=logits.device),
        positions=torch.tensor(positions, device=logits.device),
    )


def transformed(logits: Tensor, rows: Rows) -> Tensor:
    """Return the logits of that distribution."""
    x = logits if logits.dtype == torch.float64 else logits.float()
    if all(request.sampling.is_raw for request in rows.requests):
        return x
    for transform in TRANSFORMS:
        x = transform(x, rows)
    return x


def _replace(logits: Tensor, rows: list[int], values: Tensor) -> Tensor:
    if len(rows) == len(logits):
        return values
    logits = logits.clone()
    logits[rows] = values
    return logits


def _checked(name: str, found: object, vocab_size: int, is_mask: bool = False) -> Tensor:
    """Return what a request's own function gave, if it is [V]."""
    wanted = f"{'a mask' if is_mask else 'logits'} of shape ({vocab_size},)"
    if not isinstance(found, Tensor) or (is_mask and found.dtype != torch.bool):
        given = found.dtype if isinstance(found, Tensor) else type(found).__name__
        raise TypeError(
            f"{name} returned {given}: return {wanted}, as a tensor{' of bool' if is_mask else ''}"
        )
    if found.shape != (vocab_size,):
        raise ValueError(f"{name} returned a tensor of shape {tuple(found.shape)}: return {wanted}")
    return found


def process(logits: Tensor, rows: Rows) -> Tensor:
    """Let each request's own function change the logits after the row's path."""
    chosen = rows.where(lambda s: s.process is not None)
    if not chosen:
        return logits
    paths, changed = rows.paths(), []
    for row in chosen:
        request = rows.requests[rows.owners[row]]
        assert request.sampling.process is not None
        # a copy: it may be changed in place
        found = request.sampling.process([*request.output, *paths[row]], logits[row].clone())
        changed.append(_checked("process", found, logits.shape[-1]))
    return _replace(logits, chosen, torch.stack(changed).to(logits))


def penalties(logits: Tensor, rows: Rows) -> Tensor:
    """Make what has been said less likely: repetition, then frequency, then presence."""
    chosen = rows.where(
        lambda s: s.repetition_penalty != 1 or s.frequency_penalty != 0 or s.presence_penalty != 0
    )
    if not chosen:
        return logits
    vocab_size, paths = logits.shape[-1], rows.paths()
    emitted, prompts = [], []
    for row in chosen:
        request = rows.requests[rows.owners[row]]
        output = torch.tensor([*request.output, *paths[row]], dtype=torch.int64)
        emitted.append(torch.bincount(output, minlength=vocab_size))
        prompts.append(torch.bincount(torch.tensor(request.prompt), minlength=vocab_size))
    counts = torch.stack(emitted).to(logits.device)
    seen = (counts + torch.stack(prompts).to(logits.device)) > 0
    values = logits[chosen]
    repetition = rows.column(logits, chosen, lambda s: s.repetition_penalty)
    penalised = torch.where(values > 0, values / repetition, values * repetition)
    values = torch.where(seen, penalised, values)
    values = values - rows.column(logits, chosen, lambda s: s.frequency_penalty) * counts
    values = values - rows.column(logits, chosen, lambda s: s.presence_penalty) * (counts > 0)
    return _replace(logits, chosen, values)


def logit_bias(logits: Tensor, rows: Rows) -> Tensor:
    """Add each request's bias to the logits of single tokens."""
    chosen = rows.where(lambda s: bool(s.logit_bias))
    if not chosen:
        return logits
    values = logits[chosen]
    for i, row in enumerate(chosen):
        for token, bias in rows.sampling(row).logit_bias.items():
            values[i, token] += bias
    return _replace(logits, chosen, values)


def grammar(logits: Tensor, rows: Rows) -> Tensor:
    """Rule out the tokens that a request's grammar does not allow after the row's path."""
    chosen = rows.where(lambda s: s.grammar is not None)
    if not chosen:
        return logits
    paths, allowed = rows.paths(), []
    for row in chosen:
        request = rows.requests[rows.owners[row]]
        assert request.sampling.grammar is not None
        found = request.sampling.grammar([*request.output, *paths[row]])
        allowed.append(_checked("grammar", found, logits.shape[-1], is_mask=True))
    mask = torch.stack(allowed).to(logits.device)
    return _replace(logits, chosen, logits[chosen].masked_fill(~mask, -math.inf))


def temperature(logits: Tensor, rows: Rows) -> Tensor:
    """Divide by the temperature. A greedy row keeps its order, which is all it needs."""
    chosen = rows.where(lambda s: s.temperature not in (0, 1))
    if not chosen:
        return logits
    values = logits[chosen] / rows.column(logits, chosen, lambda s: s.temperature)
    return _replace(logits, chosen, values)


def top_k(logits: Tensor, rows: Rows) -> Tensor:
    """Keep the k most likely tokens, and those as likely as the last of them."""
    vocab_size = logits.shape[-1]
    chosen = rows.where(lambda s: 0 < s.top_k < vocab_size and not s.is_greedy)
    if not chosen:
        return logits
    values = logits[chosen]
    counts = [rows.sampling(row).top_k for row in chosen]
    best = values.topk(max(counts), dim=-1).values
    last = best.gather(-1, torch.tensor(counts, device=logits.device)[:, None] - 1)
    return _replace(logits, chosen, values.masked_fill(values < last, -math.inf))


def top_p(logits: Tensor, rows: Rows) -> Tensor:
    """Keep the smallest set of most likely tokens whose mass reaches top_p."""
    chosen = rows.where(lambda s: s.top_p < 1 and not s.is_greedy)
    if not chosen:
        return logits
    values = logits[chosen]
    ordered, order = torch.sort(values, dim=-1, descending=True, stable=True)
    p = ordered.softmax(-1)
    mass_before = p.cumsum(-1) - p
    removed = mass_before >= rows.column(logits, chosen, lambda s: s.top_p)
    removed[:, 0] = False  # rounding must not remove the most likely token
    removed = torch.zeros_like(removed).scatter(-1, order, removed)
    return _replace(logits, chosen, values.masked_fill(removed, -math.inf))


def min_p(logits: Tensor, rows: Rows) -> Tensor:
    """Keep the tokens at least min_p times as likely as the most likely one."""
    chosen = rows.where(lambda s: s.min_p > 0 and not s.is_greedy)
    if not chosen:
        return logits
    values = logits[chosen]
    floor = rows.column(logits, chosen, lambda s: math.log(s.min_p))
    removed = values < values.amax(-1, keepdim=True) + floor
    return _replace(logits, chosen, values.masked_fill(removed, -math.inf))


Transform = Callable[[Tensor, Rows], Tensor]
TRANSFORMS: tuple[Transform, ...] = (
    process,
    penalties,
    logit_bias,
    grammar,
    temperature,
    top_k,
    top_p,
    min_p,
)
"""The order in which the target's distribution is made."""
