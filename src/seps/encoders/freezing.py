"""Which parameters of an encoder train, and how deep in it each of them is."""

from __future__ import annotations

from torch import nn


def freeze(module: nn.Module, upto: int | None = None) -> None:
    """Stop gradients at all parameters, or, with `upto`, at the embedding and the first `upto` blocks alone.

    Blocks are the entries of the outermost ModuleList (transformer layers, Swin stages, convolution blocks).
    Later blocks and the final norm are left as they are. Raises ValueError for a block that is not there.
    """
    parts = parameters_by_depth(module)
    count = max(len(parts) - 2, 0)
    if upto is not None and not (len(parts) > 1 and 0 <= upto <= count):
        raise ValueError(f"freeze(upto={upto}): this encoder has {count} blocks; give a number from 0 to {count}.")
    for part in parts if upto is None else parts[: upto + 1]:
        for parameter in part:
            parameter.requires_grad_(False)


def unfreeze(module: nn.Module) -> None:
    """Let gradients reach every parameter again."""
    for parameter in module.parameters():
        parameter.requires_grad_(True)


def parameters_by_depth(module: nn.Module) -> list[list[nn.Parameter]]:
    """The parameters in the order they are used: embedding, each block, and what follows the blocks.

    An encoder without blocks is one list.
    """
    blocks = next((child for child in module.modules() if isinstance(child, nn.ModuleList)), None)
    if not blocks:
        return [list(module.parameters())]
    place = {id(parameter): number for number, block in enumerate(blocks, start=1) for parameter in block.parameters()}
    found: list[list[nn.Parameter]] = [[] for _ in range(len(blocks) + 2)]
    seen = 0
    for parameter in module.parameters():
        seen = place.get(id(parameter), len(blocks) + 1 if seen else 0)
        found[seen].append(parameter)
    return found
