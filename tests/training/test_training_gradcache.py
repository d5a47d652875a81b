from contextlib import nullcontext

import pytest
import torch
from torch import nn
from training_toys import Contrastive

from seps.training.gradcache import cached_forward, plain_forward


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}  # type: ignore[union-attr]
    model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("chunk_size", [1, 3, 8, 32, 50])
def test_equal_to_the_whole_batch_at_once(chunk_size: int) -> None:
    task = Contrastive(batch_size=32)
    batch = task.batch(0, 0, 0, 1)
    plain = plain_forward(task, batch, 0, nullcontext)
    plain.backward()
    expected = gradients(task.model)
    cached = cached_forward(task, batch, 0, chunk_size, nullcontext)
    cached.backward()
    assert torch.allclose(cached.loss, plain.loss, atol=1e-6)
    for name, gradient in gradients(task.model).items():
        assert torch.allclose(gradient, expected[name], atol=1e-6), name
        assert gradient.abs().max() > 1e-4


def test_dropout_is_the_same_in_both_passes() -> None:
    task = Contrastive(batch_size=32, dropout=0.5)
    batch = task.batch(0, 0, 0, 1)
    torch.manual_seed(5)
    parts = [task.encode(chunk) for chunk in task.split(batch, 8)]
    task.loss_from_features(tuple(map(torch.cat, zip(*parts, strict=True))), batch, 0)[0].backward()
    expected = gradients(task.model)
    torch.manual_seed(5)
    cached = cached_forward(task, batch, 0, 8, nullcontext)
    after = torch.get_rng_state()
    cached.backward()
    assert torch.equal(torch.get_rng_state(), after)
    for name, gradient in gradients(task.model).items():
        assert torch.allclose(gradient, expected[name], atol=1e-6), name


def test_bf16_reaches_every_weight_in_float32() -> None:
    task = Contrastive(batch_size=32)
    batch = task.batch(0, 0, 0, 1)

    def autocast() -> torch.autocast:
        return torch.autocast("cpu", dtype=torch.bfloat16)

    plain_forward(task, batch, 0, autocast).backward()
    expected = gradients(task.model)
    cached_forward(task, batch, 0, 8, autocast).backward()
    for name, gradient in gradients(task.model).items():
        assert gradient.dtype == torch.float32
        # Chunks of 8 round to bf16 as 32 rows at once do; only the order of the sums differs.
        assert torch.nn.functional.cosine_similarity(gradient.flatten(), expected[name].flatten(), dim=0) > 0.9999, name
        assert gradient.norm().item() == pytest.approx(expected[name].norm().item(), rel=1e-2), name


def test_running_statistics_move_once_per_chunk() -> None:
    task = Contrastive(batch_size=32)
    norm = nn.BatchNorm1d(8)
    task.model.image.append(norm)
    cached_forward(task, task.batch(0, 0, 0, 1), 0, 16, nullcontext).backward()
    assert int(norm.num_batches_tracked) == 2


def test_frozen_encoder_and_features_that_do_not_fit() -> None:
    task = Contrastive(batch_size=32)
    task.model.image.requires_grad_(False)
    batch = task.batch(0, 0, 0, 1)
    cached_forward(task, batch, 0, 8, nullcontext).backward()
    assert all(parameter.grad is None for parameter in task.model.image.parameters())
    assert task.model.text[0].weight.grad is not None
    encode = task.encode
    widths = iter(range(3, 9))
    task.encode = lambda chunk: (encode(chunk)[0][:, : next(widths)],)  # type: ignore[assignment,method-assign]
    with pytest.raises(ValueError, match="concatenated"):
        cached_forward(task, batch, 0, 8, nullcontext)
