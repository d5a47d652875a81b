"""Several processes as one: who we are, and the collectives that the loss and the loop need.

Convention for gradients. Each rank r scores its own rows against features gathered from all ranks and takes
the mean over those rows, L_r. The loss of the global batch is L = mean_r L_r. `gather_with_gradient` SUMS, on
its way back, what the losses of all ranks say about this rank's rows; `average_gradients` then AVERAGES the
gradients of the parameters over the ranks:

    1/W sum_r (sum_s dL_s/df_r) df_r/dtheta = d(mean_s L_s)/dtheta = dL/dtheta

Parameters used after the gather (a temperature, a head) come out right by the same average. With uneven ranks
weigh the local mean by rows * W / all rows. Everything is the identity in a single process.

Several processes give what one gives, within rounding, where the model draws no random numbers. Dropout is drawn by
each rank for its own rows (seed, step and rank seed it): then a run repeats itself with as many processes, and is
another sample of the same training with another number.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

Backend = Literal["gloo", "nccl"]
T = TypeVar("T")
_BUCKET_BYTES = 32 * 2**20


@dataclass(frozen=True)
class DistributedInfo:
    """This process among `world`: its rank, its rank on this machine, and where they all meet."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    address: str = ""
    port: int = 0
    backend: Backend = "gloo"

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world:
            raise ValueError(f"DistributedInfo.rank = {self.rank}: must be from 0 to world - 1 = {self.world - 1}.")

    @property
    def device(self) -> torch.device:
        """The device of this process: its own GPU under nccl, the CPU under gloo."""
        return torch.device("cuda", self.local_rank) if self.backend == "nccl" else torch.device("cpu")


def from_environment(environment: Mapping[str, str], backend: Backend | None = None) -> DistributedInfo:
    """What torchrun says in RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT.

    A single process when it says nothing. The backend is nccl when every process of this machine has a GPU,
    else gloo, unless given. Raises ValueError when the variables are incomplete or not numbers.
    """
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        return DistributedInfo()
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if not environment.get(name)]
    if missing:
        raise ValueError(
            f"The environment describes a distributed run but lacks {', '.join(missing)}: start with torchrun."
        )
    try:
        rank, world, port = (int(environment[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        local_rank = int(environment.get("LOCAL_RANK", rank))
        local_world = int(environment.get("LOCAL_WORLD_SIZE", world))
    except ValueError as error:
        raise ValueError(f"A rank, size or port in the environment is not a number ({error}).") from error
    if backend is None:
        enough = torch.cuda.is_available() and torch.cuda.device_count() >= local_world
        backend = "nccl" if enough and dist.is_nccl_available() else "gloo"
    return DistributedInfo(rank, world, local_rank, environment["MASTER_ADDR"], port, backend)


@contextmanager
def process_group(info: DistributedInfo, timeout_minutes: float = 30) -> Iterator[DistributedInfo]:
    """Join the other processes inside, leave them afterwards. Does nothing for a single process."""
    if info.world == 1:
        yield info
        return
    if info.backend == "nccl":
        torch.cuda.set_device(info.device)
    # This module's functions keep the group of the moment it is first imported as a default argument. Torch
    # imports it by itself later on; the group would then outlive destroy_process_group, and gloo's threads, still
    # holding tensors while python shuts down, abort the process now and then.
    importlib.import_module("torch.distributed.nn")
    dist.init_process_group(
        info.backend,
        init_method=f"tcp://{info.address}:{info.port}",
        rank=info.rank,
        world_size=info.world,
        timeout=timedelta(minutes=timeout_minutes),
    )
    try:
        yield info
        if info.backend == "gloo":
            # No rank closes its connections while another still receives. A rank that has failed in the
            # meantime breaks the barrier, which is no fault of this one.
            with suppress(RuntimeError):
                dist.barrier()
    finally:
        dist.destroy_process_group()


def world_size() -> int:
    """How many processes have joined; 1 without a group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """The rank of this process; 0 without a group."""
    return dist.get_rank() if dist.is_initialized() else 0


def _device() -> torch.device:
    if dist.is_initialized() and dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _gather_sizes(rows: int) -> list[int]:
    mine = torch.tensor([rows], dtype=torch.int64, device=_device())
    sizes = [torch.empty_like(mine) for _ in range(world_size())]
    dist.all_gather(sizes, mine)
    return [int(size) for size in sizes]


def _gather_padded(tensor: Tensor, sizes: list[int]) -> Tensor:
    padded = tensor.new_zeros((max(sizes), *tensor.shape[1:]))
    padded[: tensor.shape[0]] = tensor
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        sizes = _gather_sizes(tensor.shape[0])
        ctx.start = sum(sizes[: rank()])
        ctx.rows, ctx.dtype = tensor.shape[0], tensor.dtype
        return _gather_padded(tensor, sizes)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        total = gradients[0].to(torch.promote_types(ctx.dtype, torch.float32), copy=True).contiguous()
        dist.all_reduce(total)
        return total[ctx.start : ctx.start + ctx.rows].to(ctx.dtype)


def gather_with_gradient(tensor: Tensor) -> Tensor:
    """Rows of all ranks in rank order: (n_r, ...) on each -> (sum n_r, ...); first dimensions may differ.

    Backward sums the gradients of all ranks for this rank's rows, so every rank must use the result in its
    loss (a rank that leaves it out of the graph keeps the others waiting).
    """
    if world_size() == 1:
        return tensor
    result: Tensor = _Gather.apply(tensor)  # type: ignore[no-untyped-call]
    return result


@torch.no_grad()
def gather_ragged(tensor: Tensor) -> Tensor:
    """`gather_with_gradient` without the gradient, for evaluation and labels; any dtype."""
    if world_size() == 1:
        return tensor
    if tensor.dtype == torch.bool:
        return gather_ragged(tensor.to(torch.uint8)).bool()
    return _gather_padded(tensor, _gather_sizes(tensor.shape[0]))


def mean_values(values: Mapping[str, float]) -> dict[str, float]:
    """Average named figures over all ranks; every rank passes the same names.

    A figure that is NaN or infinite on one rank is so in the result.
    """
    if world_size() == 1:
        return dict(values)
    names = sorted(values)
    packed = torch.tensor([values[name] for name in names], dtype=torch.float64, device=_device())
    dist.all_reduce(packed)
    return dict(zip(names, (packed / world_size()).tolist(), strict=True))


def any_rank(flag: bool) -> bool:
    """Whether `flag` is true on at least one rank."""
    return mean_values({"flag": float(flag)})["flag"] > 0


@torch.no_grad()
def broadcast(tensor: Tensor) -> Tensor:
    """The tensor of rank 0, on every rank, in place (bool and any stride allowed)."""
    if world_size() > 1:
        held = tensor.detach().to(_device())
        held = held.to(torch.uint8) if held.dtype == torch.bool else held.contiguous()
        dist.broadcast(held, 0)
        tensor.copy_(held)
    return tensor


def broadcast_json(value: T) -> T:
    """Send a JSON value from rank 0 to all ranks and return it; what other ranks pass is ignored.

    It travels as JSON text, never as a pickle.
    """
    if world_size() == 1:
        return value
    text = json.dumps(value).encode() if rank() == 0 else b""
    size = broadcast(torch.tensor([len(text)]))
    held = torch.frombuffer(bytearray(text or bytes(int(size))), dtype=torch.uint8)
    loaded: T = json.loads(bytes(broadcast(held).tolist()))
    return loaded


def broadcast_tensors(tensors: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """Named tensors of rank 0, on every rank, on the CPU; what other ranks pass is not looked at."""
    if world_size() == 1:
        return dict(tensors or {})
    mine = dict(tensors or {}) if rank() == 0 else {}
    header = broadcast_json([(name, str(t.dtype).split(".")[1], list(t.shape)) for name, t in mine.items()])
    for name, dtype, shape in header:
        broadcast(mine.setdefault(name, torch.empty(shape, dtype=getattr(torch, dtype))))
    return mine


def broadcast_module(module: nn.Module) -> None:
    """Give every rank the parameters and buffers of rank 0."""
    if world_size() > 1:
        for tensor in (*module.parameters(), *module.buffers()):
            broadcast(tensor.data)


@torch.no_grad()
def average_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Average the gradients over the ranks, in flat buckets; a rank without one counts as zero."""
    if world_size() == 1:
        return
    every = list(parameters)
    has = torch.tensor([parameter.grad is not None for parameter in every], dtype=torch.float32, device=_device())
    dist.all_reduce(has)
    used = [parameter for parameter, count in zip(every, has.tolist(), strict=True) if count]
    for bucket in _buckets(used):
        for parameter in bucket:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in bucket if parameter.grad is not None]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat)
        flat /= world_size()
        parts = torch.split(flat, [gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


def _buckets(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    bucket: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        if bucket and (size > _BUCKET_BYTES or parameter.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += parameter.numel() * parameter.element_size()
    if bucket:
        yield bucket


def on_first_rank(action: Callable[[], T]) -> T | None:
    """Run `action` on rank 0 while the others wait; an error there is raised on all of them."""
    result: T | None = None
    error: Exception | None = None
    if rank() == 0:
        try:
            result = action()
        except Exception as caught:
            error = caught
    message = broadcast_json("" if error is None else str(error) or type(error).__name__)
    if error is not None:
        raise error
    if message:
        raise ValueError(f"The first process stopped: {message}")
    return result
