"""The smallest engine over the served step. Its target repeats the prompt, again and again.

A text has prompt[p % len(prompt)] at position p, so a pass needs neither weights nor a cache, only
where each of its rows stands. (A model reads the rows' tokens as well. Of a plain step that is
launched early, the device alone knows them.) `Echo` is what the served step asks of an engine, and
`EchoServer` the scheduler around it. The whole answer to both is in `engines/in_process.py` and
`engines/schedule.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from outrider.control.decision import CpuDrafts, Decision, DeviceDrafts, Plain
from outrider.core import FinishReason, Ints, KeyedCoins, Proposal
from outrider.core.settle import kept_tokens
from outrider.engines.in_process import InProcessRequest, describe
from outrider.serving.decider import Decider
from outrider.serving.device import DeviceRows, DeviceTexts
from outrider.serving.device_drafters import DeviceDrafters
from outrider.serving.in_flight import InFlight
from outrider.serving.make_pool import make_pool
from outrider.serving.profile import DEVICE, Profile
from outrider.serving.rows import RowBudget
from outrider.serving.step import ServedStep
from outrider.serving.table import RequestTable
from outrider.serving.telemetry import Telemetry
from outrider.serving.values import (
    Batch,
    Knows,
    Launched,
    Members,
    PrefillLaunch,
    ServedRequest,
    Settled,
)


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of a pass: for each request its last token, its root, and then its drafts.

    shape: a proposal with as many drafts of each request
    index, seq_lens: [N] each row's request, by `row`, and the length of its text up to the row
    drafts: of the device, if it makes them
    """

    shape: Proposal
    index: Tensor
    seq_lens: Tensor
    drafts: DeviceRows | None = None


class Echo:
    """The engine: see `serving.values.Engine`.

    lens: [requests] how many tokens of each are cached, as the device knows it
    log: "run" for each decode step that was launched, "read" for each whose result was waited for
    """

    def __init__(self, prompts: Sequence[Sequence[int]], drafters: DeviceDrafters) -> None:
        self._prompts = pad_sequence([torch.tensor(each) for each in prompts], batch_first=True)
        self._sizes = torch.tensor([len(each) for each in prompts])
        self._drafters = drafters
        self.lens = self._sizes.clone()
        self.log: list[str] = []

    def _target(self, index: Tensor, seq_lens: Tensor) -> Tensor:
        """Return what follows each row, [N]: a pass and its sampling."""
        return self._prompts[index, seq_lens % self._sizes[index]]

    def prefill(self, reqs: Sequence[InProcessRequest]) -> Tensor:
        """Launch the pass that reads the prompts. Return what follows each."""
        index, lens = torch.arange(len(self._sizes)), self._sizes
        tokens = self._target(index, lens)
        self._drafters.enter(reqs, index, lens, tokens, partial=np.empty(0, np.int64))
        return tokens

    # -- what the served step calls, in this order

    def prepare(self, batch: Batch, requests: Sequence[ServedRequest]) -> Batch:
        """Return the batch with the lengths that the CPU knows: nothing is in flight."""
        return replace(batch, lens=torch.tensor([request.length - 1 for request in requests]))

    def choose_pass(self, batch: Batch, members: Members, decision: CpuDrafts) -> CpuDrafts:
        """Return the decision as it is: there is one kind of pass."""
        return decision

    def lay_out(
        self, batch: Batch, members: Members, decision: Decision, drafts: DeviceRows | None
    ) -> Rows:
        """Return the rows of a step. Those with drafts of the device are laid out already."""
        if drafts is not None:
            return Rows(drafts.layout.shape, drafts.owner_index, drafts.seq_lens, drafts)
        shape: Proposal = Proposal.empty(len(members.requests))
        if isinstance(decision, CpuDrafts):
            shape = decision.proposal
        places = torch.from_numpy(members.places[shape.row_owners])
        depths = torch.from_numpy(shape.row_depths)
        return Rows(shape, batch.index[places], batch.lens[places] + 1 + depths)

    def run(self, rows: Rows) -> Tensor:
        """Launch a pass, and move the device's lengths on. Return what the CPU will read."""
        self.log.append("run")
        emitted = self._target(rows.index, rows.seq_lens)
        roots = torch.from_numpy(rows.shape.root_rows)
        lens = rows.seq_lens[roots]  # but for drafts of the CPU, which `prepare` counts
        if rows.drafts is not None:
            lens, emitted = self._drafters.advance(rows.drafts, emitted)
        elif not len(rows.shape.parents):
            self._drafters.append(rows.index, lens, emitted)
        self.lens[rows.index[roots]] = lens
        return emitted

    def emitted(self, ticket: Tensor) -> Tensor:
        """Wait for a step. Return what it emitted."""
        self.log.append("read")
        return ticket

    def first_tokens(self, ticket: Tensor) -> list[int]:
        """Wait for the prefill. Return the first token of each answer."""
        return [int(token) for token in ticket]

    def keep(
        self,
        launched: Launched,
        running: Ints,
        requests: Sequence[ServedRequest],
        tokens: Ints,
        counts: Ints,
    ) -> tuple[Ints, Sequence[FinishReason | None]]:
        """Return how many of its tokens each request keeps: requests end as everywhere."""
        return kept_tokens(requests, tokens, counts)

    def place(self, settled: Settled) -> None:
        """Do nothing: there are no slots, and no trees."""


KNOWS_AFTER = {Plain: Knows.BOTH, CpuDrafts: Knows.CPU, DeviceDrafts: Knows.DEVICE}
"""Who knows, or will know first, how long each request is after a step with such drafts."""


class EchoServer:
    """Serves these requests, all at once, with a step launched before the last is taken in."""

    def __init__(self, reqs: Sequence[InProcessRequest]) -> None:
        for row, req in enumerate(reqs):
            req.row = row
        most = max(req.max_drafts for req in reqs)
        vocab_size = 1 + max(max(req.prompt) for req in reqs)
        names = sorted({"none", *(req.drafter for req in reqs)})
        pool = make_pool(Profile(), names, vocab_size, device_depths={DEVICE: most})
        # the device drafts where two steps more would fit: so they do, beside the longest text
        width = max(req.length + req.sampling.max_tokens for req in reqs) + 2 * (most + 1)
        slots = torch.zeros(len(reqs), width, dtype=torch.int32)  # of a cache, if there were one
        drafters = DeviceDrafters(DeviceTexts(slots, pool.lookup))
        limit = len(reqs) * (1 + most)
        budget = RowBudget(limit, vocab_size, logit_bytes=4, coins=KeyedCoins(), trees=False)
        self._table, self._in_flight = RequestTable(describe, pool), InFlight()
        self.engine = Echo([req.prompt for req in reqs], drafters)
        self._step = ServedStep(
            self.engine,
            self._table,
            pool,
            drafters,
            Decider(self._table, pool, drafters, budget),
            Telemetry(pool),
            self._in_flight,
        )
        self._reqs = reqs

    def serve(self) -> list[Settled]:
        """Run all requests to their ends. Return the decode steps."""
        lengths = [req.length for req in self._reqs]
        prefill = PrefillLaunch(self._reqs, lengths, self.engine.prefill(self._reqs))
        self._in_flight.append(prefill)
        launched, steps = deque([self._launch(None)]), list[Settled]()
        for req, token in zip(self._reqs, self.engine.first_tokens(prefill.ticket), strict=True):
            req.extend([token], req.finish_after([token]))
        while launched:
            if not all(req.finished() for req in self._reqs):
                launched.append(self._launch(launched[-1]))
            steps.append(self._step.outcome_of(launched.popleft()))
            reqs = [request.req for request in steps[-1].members.requests]
            for req, outcome in zip(reqs, steps[-1].outcomes, strict=True):
                if not req.finished():  # by its first token, of which the served step knows nothing
                    req.extend(outcome.tokens, outcome.finish_reason)
            self._step.after_outcome()
        return steps

    def _launch(self, last: Launched | None) -> Launched:
        """Launch a decode step of the requests that are not known to have ended."""
        reqs = [req for req in self._reqs if not req.finished()]
        index = torch.tensor([req.row for req in reqs])
        return self._step.launch(
            Batch(
                reqs=reqs,
                knows=KNOWS_AFTER[type(last.decision)] if last else Knows.BOTH,
                longest=self._in_flight.max_cached(reqs, self._table),
                index=index,
                lens=self.engine.lens[index],
                own=None,
                device_drafter=last.device_drafter if last else "",
            )
        )
