"""Self test of the single file, which runs where the file is run as a program.

It compares counts, shapes, figures, a training step, gradients and a loss with what stands here, and ends with status
0, or 1. Inputs and weights follow a formula, so that no random generator has a part in the figures, which hold to 1e-5.
The similarities behind the loss were measured on a dual-mode version of the published code.

Shapes: B images, T texts, N patches, M words of a caption, L words of a description, C width, Q merged patches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from seps.method.losses.combined import SEPSLoss
from seps.method.losses.triplet import ContrastiveLoss
from seps.method.relaxation import soft_topk
from seps.method.select import TokenSparse
from seps.method.sensors import MultiModalSDTPS
from seps.modules.network import CrossSparseAggrNet

_PARAMETERS = {"code": 291, "paper": 1198}
"""Of the network at embed 32, 16 patches, 0.5 / 0.5."""
_SIMILARITY = {
    "code": [[0.4722238, 0.3507319], [0.7114013, 0.5159919]],
    "paper": [[-0.9358120, -1.0828537], [-0.8979966, -1.0101701]],
}
"""(B, T) for the inputs and weights of the formula."""
_KEPT = {"code": [0, 1, 2, 3, 9, 11, 14, 15], "paper": [0, 1, 2, 3, 9, 10, 11, 12]}
"""Places of the patches that caption 0 alone, without descriptions, keeps in image 0."""
_SELECTED = {"code": [-0.0107082, -0.0454655, -0.1516673], "paper": [-0.0212890, -0.0861183, -0.0285302]}
"""`_trace` of the kept patches, the extra token and D of one call of `TokenSparse`."""
_SENSORS = [[0.0004457, 0.0034273], [0.0012383, 0.0006364], [0.0048000, 0.0022736]]
"""`_trace` of each sample's tokens, by sensor."""
_RELAXED = [[-0.0545070, 0.0384207], [0.0067662, 0.0090247]]
"""`_trace` of each row of the relaxation, and of the gradient of its trace."""
_MEASURED = [
    [0.86753416, 1.02308166, 0.95797390, 1.02218628, 0.80907696],
    [1.00429130, 0.99303079, 0.94877064, 0.86714303, 0.97175562],
    [1.04695201, 0.84640276, 0.96009016, 0.99605161, 0.76301789],
    [0.75362122, 0.98250276, 1.03173184, 0.79388773, 0.79667157],
    [0.94797289, 0.97267270, 0.85192931, 1.06883502, 0.76363313],
]
"""(B, B) similarities of the dual-mode version, and the loss it gives (Eq. 6, margin 0.2, hardest negatives)."""
_MEASURED_LOSS = 3.5608964


def _pattern(shift: float, *shape: int) -> Tensor:
    """Numbers between -1 and 1 that every machine computes alike: `sin(0.37 k^1.5 + shift)` for k = 1, 2, ..."""
    k = torch.arange(1, math.prod(shape) + 1, dtype=torch.float64)
    return torch.sin(0.37 * k**1.5 + shift).float().reshape(shape)


def _trace(tensor: Tensor) -> Tensor:
    """A mean of each row with the formula as weights, (B, ...) -> (B,): almost any change of a row changes it."""
    rows = tensor.flatten(1)
    return (rows * _pattern(9.0, *rows.shape[1:]).to(rows.device)).mean(dim=1)


def _fill(module: nn.Module) -> None:
    """Put the formula into all weights."""
    with torch.no_grad():
        for i, (_, weight) in enumerate(sorted(module.named_parameters())):
            weight.copy_(0.5 * _pattern(i, *weight.shape))


def _tiny_net(mode: str, gumbel: bool = False) -> CrossSparseAggrNet:
    """The network at embed 32, 16 patches, 0.5 / 0.5 with the weights of the formula."""
    paper = mode == "paper"
    net = CrossSparseAggrNet(32, 16, 0.5, 0.5, use_paper_version=paper, use_gumbel_softmax=gumbel, has_cls=True)
    _fill(net)
    return net


def _tiny_sensors(gumbel: bool = False) -> MultiModalSDTPS:
    """The sensors' module at width 32 and 128 patches with the weights of the formula."""
    net = MultiModalSDTPS(embed_dim=32, num_patches=128, use_gumbel=gumbel)
    _fill(net)
    return net


def _tiny_shots() -> list[Tensor]:
    """Three patch tensors (2, 128, 32) and three global vectors (2, 32)."""
    return [*(_pattern(float(i), 2, 128, 32) for i in range(3)), *(_pattern(float(i), 2, 32) for i in range(3, 6))]


def _tiny_selection(mode: str) -> tuple[TokenSparse, list[Tensor]]:
    """`TokenSparse` at width 32 with the weights of the formula, patches (2, 16, 32) and three attentions (2, 16)."""
    net = TokenSparse(32, 0.5, use_paper_version=mode == "paper")
    _fill(net)
    return net, [_pattern(1.0, 2, 16, 32), *(_pattern(float(i), 2, 16) for i in range(4, 7))]


def _tiny_batch() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Images (2, 17, 32), captions (2, 5, 32) with their lengths, descriptions (2, 7, 32) with theirs."""
    captions, descriptions = _pattern(2.0, 2, 5, 32), _pattern(3.0, 2, 7, 32)
    return _pattern(1.0, 2, 17, 32), captions, torch.tensor([5, 3]), descriptions, torch.tensor([7, 4])


def _expect(holds: bool, told: str) -> str:
    """`told` if it holds, otherwise an `AssertionError` that says it."""
    if not holds:
        raise AssertionError(told)
    return told


def _close(found: Tensor, wanted: object) -> bool:
    """Equal to 1e-5, in any device's memory."""
    return torch.allclose(found.detach().cpu().float(), torch.tensor(wanted), rtol=0, atol=1e-5)


def _look_at_network(mode: str, device: torch.device) -> str:
    net = _tiny_net(mode).to(device)
    count = sum(weight.numel() for weight in net.parameters())
    _expect(count == _PARAMETERS[mode], f"{count} parameters, {_PARAMETERS[mode]} expected")
    batch = [tensor.to(device) for tensor in _tiny_batch()]
    similarity, masks = net.train()(*batch)
    listed = masks if isinstance(masks, tuple) else (masks,)
    shapes = [tuple(mask.shape) for mask in listed]
    told = f"{count} parameters, similarity {tuple(similarity.shape)}, masks {', '.join(map(str, shapes))}"
    right = tuple(similarity.shape) == (2, 2) and shapes == [(2, 2, 16)] * (2 if mode == "paper" else 1)
    kept = sum(mask.sum(dim=-1) for mask in listed)
    _expect(right and bool((kept == 16).all()), f"{told}; both branches keep {kept.tolist()} patches, 2 x 8 expected")
    _expect(torch.equal(net.eval()(*batch), similarity), f"{told}; evaluation gives another similarity")
    _expect(_close(similarity, _SIMILARITY[mode]), f"similarity {similarity.tolist()}, {_SIMILARITY[mode]} expected")
    alone = net.train()(*batch[:3])[1]
    places = (alone[0] if isinstance(alone, tuple) else alone)[0, 0].nonzero().flatten().tolist()
    return _expect(places == _KEPT[mode], f"{told}; patches {places} are kept, {_KEPT[mode]} expected")


def _look_at_training(mode: str, device: torch.device) -> str:
    net = _tiny_net(mode).to(device).train()
    images, *texts = (tensor.to(device) for tensor in _tiny_batch())
    images.requires_grad_()
    # The ratio loss is a constant where a fixed number of patches is kept, and would warn.
    objective = SEPSLoss(margin=2.0, ratio_weight=0.0)
    weights, losses = list(net.parameters()), []
    for _ in range(2):
        total = objective(*net(images, *texts))[0]
        losses.append(total.item())
        *gradients, at_images = torch.autograd.grad(total, [*weights, images])
        finite = all(bool(gradient.isfinite().all()) for gradient in (total, at_images, *gradients))
        _expect(finite, f"loss {losses[-1]}: the loss or a gradient is not finite")
        _expect(bool(at_images[:, 1:].any()), "no gradient reaches the patches")
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.sub_(0.1 * gradient)
    told = f"finite gradients, loss {losses[0]:.4f} -> {losses[1]:.4f} after one step"
    return _expect(losses[1] < losses[0], told)


def _look_at_selection(mode: str, device: torch.device) -> str:
    net, inputs = _tiny_selection(mode)
    chosen = net.to(device)(*(tensor.to(device) for tensor in inputs))
    found = torch.stack([_trace(part)[0] for part in chosen])
    _expect(_close(found, _SELECTED[mode]), f"kept, extra and D {found.tolist()}, {_SELECTED[mode]} expected")
    return "kept patches, extra token and D as recorded"


def test_relaxation(device: torch.device) -> str:
    """The relaxation and its gradient."""
    logits = (3 * _pattern(1.0, 2, 10)).to(device).requires_grad_()
    soft = soft_topk(logits, torch.tensor([[3], [6]], device=device), 0.7)
    (slope,) = torch.autograd.grad(_trace(soft).sum(), logits)
    found = torch.stack([_trace(soft), _trace(slope)])
    _expect(_close(found, _RELAXED), f"relaxation and gradient {found.tolist()}, {_RELAXED} expected")
    return "probabilities that sum to K, and their gradient, as recorded"


def _gumbel_gradient(
    make: Callable[[bool], nn.Module], batch: Callable[[], Sequence[Tensor]], name: str, device: torch.device
) -> str:
    """With Gumbel the forward pass is the same, and the gradient of D reaches the predictor of the part `name`."""
    values, gradients = [], []
    for gumbel in (False, True):
        module = make(gumbel).to(device).train()
        values.append(module(*(tensor.to(device) for tensor in batch()))[0])
        weight = module.get_parameter(f"{name}.score_predictor.0.weight")
        gradients.append(torch.autograd.grad(_trace(values[-1]).sum(), weight)[0])
    _expect(torch.equal(*values), "Gumbel changes the forward pass")
    apart = float((gradients[0] - gradients[1]).abs().max())
    _expect(math.isfinite(apart) and apart > 1e-6, f"with Gumbel the gradient at the predictor moves by {apart:.1e}")
    return "the same forward pass; the gradient of D reaches the predictor"


def test_gumbel(device: torch.device) -> str:
    """In training D is that of the plain top-K, and carries a gradient."""
    net, inputs = _tiny_selection("paper")
    net.to(device).train()
    inputs = [tensor.to(device) for tensor in inputs]
    plain, relaxed = (net(*inputs, use_gumbel=gumbel)[2] for gumbel in (False, True))
    _expect(torch.equal(plain, relaxed.detach()), "use_gumbel changes which patches TokenSparse keeps")
    return _expect(relaxed.requires_grad, "D of the plain top-K, with a gradient")


def test_sensors(device: torch.device) -> str:
    """The sensors' module."""
    net: nn.Module = _tiny_sensors().to(device)
    *tokens, rgb, nir, tir = net(*(tensor.to(device) for tensor in _tiny_shots()))
    kept = {int(count) for mask in (rgb, nir, tir) for count in mask.sum(dim=-1)}
    shapes = {tuple(part.shape) for part in tokens}
    told = f"128 -> {sorted(kept)} -> {sorted(shapes)}, 128 -> 64 -> 25 + 1 expected"
    _expect(kept == {64} and shapes == {(2, 26, 32)}, told)
    found = torch.stack([_trace(part) for part in tokens])
    _expect(_close(found, _SENSORS), f"tokens {found.tolist()}, {_SENSORS} expected")
    return "128 -> 64 -> 25 + 1 tokens for each of three sensors, as recorded"


def test_loss(device: torch.device) -> str:
    """The triplet loss."""
    loss = ContrastiveLoss(0.2, True)(torch.tensor(_MEASURED, device=device))
    return _expect(_close(loss, _MEASURED_LOSS), f"triplet loss {float(loss):.6f}, {_MEASURED_LOSS:.6f} expected")


test_code_selection = partial(_look_at_selection, "code")
test_paper_selection = partial(_look_at_selection, "paper")
test_code_network = partial(_look_at_network, "code")
test_paper_network = partial(_look_at_network, "paper")
test_code_training = partial(_look_at_training, "code")
test_paper_training = partial(_look_at_training, "paper")
test_network_gumbel = partial(_gumbel_gradient, partial(_tiny_net, "paper"), _tiny_batch, "sparse_net_cap")
test_sensors_gumbel = partial(_gumbel_gradient, _tiny_sensors, _tiny_shots, "rgb_sparse")


def self_test(write: Callable[[str], object]) -> int:
    """Run all checks, pass one line for each to `write`, and return the exit status: 0, or 1 if one failed."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    write(f"device {device}, torch {torch.__version__}")
    checks = {name: value for name, value in globals().items() if name.startswith("test_")}
    failed = 0
    for name, run in checks.items():
        name = name[len("test_") :].replace("_", " ")
        try:
            write(f"ok      {name}: {run(device)}")
        except Exception as error:  # whatever a changed file does, the other checks still run
            failed += 1
            write(f"FAILED  {name}: {type(error).__name__}: {error}")
    write(f"{len(checks) - failed} of {len(checks)} checks passed.")
    return 1 if failed else 0
