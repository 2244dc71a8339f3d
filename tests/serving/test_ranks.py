"""What ranks tell each other: real processes, joined by gloo."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from outrider.serving.ranks import WORDS, Message, Ranks

LISTS = [
    (Message.DECODE, [[1, 2], [3], []]),
    (Message.EXTEND, [list(range(3 * WORDS)), [7]]),
    (Message.EXTEND, [list(range(WORDS - 4))]),  # exactly one broadcast
    (Message.EXTEND, [list(range(WORDS - 3))]),
    (Message.DONE, []),
]


class Group:
    """As much of SGLang's group as is looked at, here of the whole world."""

    def __init__(self, rank, size):
        self.rank_in_group, self.world_size, self.ranks = rank, size, list(range(size))
        self.cpu_group = None

    def broadcast(self, tensor, src):
        dist.broadcast(tensor, src)


def talk(rank, size, address, queue):
    dist.init_process_group("gloo", f"file://{address}", rank=rank, world_size=size)
    ranks = Ranks(Group(rank, size))
    heard = []
    for message, lists in LISTS:
        if ranks.leads:
            ranks.tell(message, *lists)
        else:
            heard.append(ranks.hear())
    flags = [ranks.any(False), ranks.any(rank == 1), ranks.any(True)]
    tokens = ranks.of_rank_0(torch.tensor([5, 6 + rank])).tolist()
    queue.put((rank, heard, flags, tokens))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_hear_what_rank_0_tells(size, tmp_path):
    context = mp.get_context("spawn")
    queue = context.SimpleQueue()
    processes = mp.spawn(talk, (size, tmp_path / "store", queue), nprocs=size, join=False)
    while not processes.join(timeout=60):
        pass
    for rank, heard, flags, tokens in sorted(queue.get() for _ in range(size)):
        assert heard == ([] if rank == 0 else LISTS)
        assert flags == [False, True, True]
        assert tokens == [5, 6]


def test_one_rank_has_nobody_to_tell():
    """No collective call is made: there is no process group here at all."""
    ranks = Ranks(SimpleNamespace(rank_in_group=0, world_size=1))
    ranks.tell(Message.DONE, [1])
    assert ranks.leads
    assert (ranks.any(False), ranks.any(True)) == (False, True)
    assert ranks.of_rank_0(torch.tensor([3])).tolist() == [3]
