"""Our modules, and the single files, against figures measured on the reference implementations, to 1e-5."""

from __future__ import annotations

import pytest
import torch

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def published_net(seps, settings, **overrides):
    names = ("embed_size", "num_patches", "sparse_ratio", "aggr_ratio", "has_cls")
    return seps.CrossSparseAggrNet(**{k: settings[k] for k in names}, **overrides)


@pytest.mark.parametrize("name", ["open_source_vit", "open_source_swin"])
def test_published_network_outputs_losses_and_gradients(seps, golden, name):
    data = golden(name)
    net = published_net(seps, data.settings, detach_patches=True)
    net.load_state_dict(data.state, strict=True)
    inputs = {k: data[k].clone().requires_grad_() for k in ("img_embs", "cap_embs", "long_cap_embs")}
    net.train()
    sims, mask = net(
        inputs["img_embs"],
        inputs["cap_embs"],
        data["cap_lens"],
        inputs["long_cap_embs"],
        data["long_cap_lens"],
    )
    torch.testing.assert_close(sims, data["sims"], **TOLERANCE)
    torch.testing.assert_close(mask, data["score_mask"], **TOLERANCE)
    size = min(sims.shape)
    criterion = seps.SEPSLoss(
        margin=data.settings["margin"],
        target_ratio=data.settings["sparse_ratio"],
        ratio_weight=data.settings["ratio_weight"],
        max_violation=True,
    )
    with pytest.warns(UserWarning, match="cannot act"):
        total, align, ratio = criterion(sims[:size, :size], mask)
    for ours, theirs in ((total, "loss_total"), (align, "loss_align_hard"), (ratio, "loss_ratio")):
        torch.testing.assert_close(ours.reshape(1), data[theirs], **TOLERANCE)
    total.backward()
    for key, tensor in inputs.items():
        if f"grad_{key}" in data:
            torch.testing.assert_close(tensor.grad, data[f"grad_{key}"], **TOLERANCE)
        else:  # Swin: the published code gives the image no gradient at all
            assert tensor.grad is None or not tensor.grad.any()
    for key, parameter in net.named_parameters():
        torch.testing.assert_close(parameter.grad, data[f"grad.{key}"], **TOLERANCE)


@pytest.mark.parametrize(
    "name", ["dual_mode_code", "dual_mode_code_nodense", "dual_mode_paper", "dual_mode_paper_single"]
)
def test_dual_mode_network(seps, golden, name):
    data = golden(name)
    settings = data.settings
    net = published_net(
        seps,
        settings,
        use_paper_version=settings["use_paper_version"],
        use_dual_aggr=settings["use_dual_aggr"],
        beta=settings["beta"],
        top_k=settings["top_k"],
    )
    net.load_state_dict(data.state, strict=True)
    assert sum(p.numel() for p in net.parameters()) == settings["parameters"]
    dense = (data["long_cap_embs"], data["long_cap_lens"]) if settings["dense"] else ()
    net.train()
    sims, masks = net(data["img_embs"], data["cap_embs"], data["cap_lens"], *dense)
    torch.testing.assert_close(sims, data["sims"], **TOLERANCE)
    for i, mask in enumerate(masks if isinstance(masks, tuple) else (masks,)):
        torch.testing.assert_close(mask, data[f"score_mask.{i}"], **TOLERANCE)
    assert isinstance(masks, tuple) == settings["use_paper_version"]
    net.eval()
    torch.testing.assert_close(net(data["img_embs"], data["cap_embs"], data["cap_lens"], *dense), sims)

    size = min(sims.shape)
    square = sims[:size, :size]
    loss_a = seps.SEPSLoss(margin=0.2, target_ratio=0.5, ratio_weight=2, max_violation=True)
    loss_b = seps.SEPSLoss(
        margin=0.2,
        target_ratio=0.3,
        ratio_weight=2,
        max_violation=False,
        lambda_sparse=0.5,
        lambda_dense=0.25,
    )
    with pytest.warns(UserWarning, match="cannot act"):
        torch.testing.assert_close(torch.stack(loss_a(square, masks)), data["loss_a"], **TOLERANCE)
    with pytest.warns(UserWarning, match="cannot act"):
        torch.testing.assert_close(torch.stack(loss_b(square, masks, data["img_ids_b"])), data["loss_b"], **TOLERANCE)


def test_multimodal_module(seps, golden):
    data = golden("multimodal_sdtps")
    names = ("embed_dim", "num_patches", "sparse_ratio", "aggr_ratio", "beta")
    net = seps.MultiModalSDTPS(**{k: data.settings[k] for k in names})
    net.load_state_dict(data.state, strict=True)
    net.eval()
    sensors = ("rgb", "nir", "tir")
    out = net(*(data[m] for m in sensors), *(data[f"{m}_global"] for m in sensors))
    for i, m in enumerate(sensors):
        torch.testing.assert_close(out[i], data[f"{m}_out"], **TOLERANCE)
        torch.testing.assert_close(out[3 + i], data[f"{m}_mask"], **TOLERANCE)


@pytest.mark.parametrize(("paper", "count"), [(False, 291), (True, 1198)])
def test_parameter_counts(seps, paper, count):
    net = seps.CrossSparseAggrNet(32, 16, 0.5, 0.5, use_paper_version=paper, has_cls=True)
    assert sum(p.numel() for p in net.parameters()) == count
