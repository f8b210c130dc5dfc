"""Several devices as one: data parallelism by sums, so that every rank holds the same state to the bit.

Each rank draws and scores its own prompts and trains on its own rows of every batch. What all need is put
together by adding zero-filled tensors, which is exact; gradients are added once per optimiser step. Random
draws are made alike on every rank and cut, so they do not depend on the number of devices.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recast_engine.errors import ConfigError, DeviceLost
from recast_engine.observer import Stopped

TIMEOUT = timedelta(hours=6)
"""How long ranks wait for the first one while it works alone (a profile). A rank that died is noticed by its
closed connection or by the launcher, not by this."""

Value = TypeVar("Value")


class Devices:
    """This process among the ``size`` that train together; alone by default."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size

    @property
    def leads(self) -> bool:
        """Whether this is the rank that reports and writes files."""
        return self.rank == 0

    def share(self, count: int) -> range:
        """This rank's contiguous part of ``range(count)``; parts differ in size by at most one."""
        return range(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def add(self, values: Tensor) -> Tensor:
        """Sum of ``values`` over the ranks, in place. Raises DeviceLost."""
        if self.size > 1:
            with _peers():
                dist.all_reduce(values)
        return values

    def total(self, count: int) -> int:
        """Sum of ``count`` over the ranks. Raises DeviceLost."""
        return int(self.add(torch.tensor(count)))

    def join(self, own: Tensor, count: int) -> Tensor:
        """All ranks' rows (count, ...) from each one's rows ``share(count)``. Raises DeviceLost."""
        if self.size == 1:
            return own
        whole = own.new_zeros((count, *own.shape[1:]))
        rows = self.share(count)
        whole[rows.start : rows.stop] = own
        return self.add(whole)

    def add_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Add the gradients over the ranks; one that no rank has stays None. Raises DeviceLost."""
        if self.size == 1:
            return
        device, dtype = parameters[0].device, parameters[0].dtype
        present = torch.tensor([p.grad is not None for p in parameters], dtype=dtype, device=device)
        own = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        total = self.add(torch.cat([present, *(gradient.flatten() for gradient in own)]))
        used = total[: len(parameters)].cpu() > 0
        parts = torch.split(total[len(parameters) :], [p.numel() for p in parameters])
        for parameter, part, there in zip(parameters, parts, used.tolist(), strict=True):
            parameter.grad = part.view_as(parameter).clone() if there else None

    def agree(self, wish: bool) -> bool:
        """The first rank's ``wish``. Raises DeviceLost."""
        return bool(self.add(torch.tensor(float(wish and self.leads))))

    def lead(self, work: Callable[[], Value]) -> Value:
        """The result (JSON data) of ``work``, done by the first rank alone, on every rank.

        Raises:
            Stopped: ``work`` did, on every rank.
            DeviceLost: it failed on the first rank, which raises its own error.
        """
        if self.size == 1:
            return work()
        if not self.leads:
            answer = self._broadcast(b"")
            if not answer:
                raise Stopped
            return json.loads(answer)  # type: ignore[no-any-return]
        try:
            value = work()
        except Stopped:
            self._broadcast(b"")
            raise
        answer = self._broadcast(json.dumps(value).encode())
        return json.loads(answer)  # type: ignore[no-any-return]

    def _broadcast(self, data: bytes) -> bytes:
        with _peers():
            length = torch.tensor(len(data))
            dist.broadcast(length, 0)
            buffer = torch.zeros(int(length), dtype=torch.uint8)
            if self.leads and data:
                buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            dist.broadcast(buffer, 0)
        return bytes(buffer.tolist())

    def require_same(self, tensors: Sequence[Tensor], what: str) -> None:
        """Raises DeviceLost when the ranks' ``tensors`` differ in a single bit."""
        if self.size == 1:
            return
        bits = [t.detach().cpu().contiguous().view(torch.int32).long().sum() for t in tensors]
        mine = torch.stack(bits)
        if not torch.equal(self.add(mine.clone()), mine * self.size):
            raise DeviceLost(f"the devices disagree about {what}")


ALONE = Devices()


@contextmanager
def joined(wanted: int) -> Iterator[Devices]:
    """The process group that the launcher (torchrun) made, of ``wanted`` processes; alone without one.

    GPUs talk through NCCL, CPUs through Gloo. The process then uses the GPU of its local rank.

    Raises:
        ConfigError: another number of processes was launched, or there are fewer GPUs.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size != wanted:
        raise ConfigError(f"devices: {wanted} are configured, but {size} process(es) were launched")
    if size == 1:
        yield ALONE
        return
    backend = "gloo"
    if torch.cuda.is_available():
        there = torch.cuda.device_count()
        if wanted > there:
            raise ConfigError(
                f"devices: {wanted} are configured, the worker's machine has {there}: "
                f"ask for at most {there}, or have a worker with more"
            )
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=TIMEOUT)
    try:
        yield Devices(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()


@contextmanager
def _peers() -> Iterator[None]:
    """Failures of communication as DeviceLost."""
    try:
        yield
    except RuntimeError as error:
        raise DeviceLost(f"another device's process is gone: {error}") from error
