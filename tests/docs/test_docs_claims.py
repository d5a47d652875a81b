"""What the pages say about others' code: each defect names its file and call, and what can be computed is computed."""

from __future__ import annotations

import math
import re

import torch
from doc_blocks import PAGES, ROOT

METHOD = (ROOT / "docs/method.md").read_text(encoding="utf-8")


def table(title: str) -> list[list[str]]:
    """The cells of the table under a heading, without its head."""
    section = METHOD.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def test_each_defect_names_a_file_and_a_call() -> None:
    rows = table("Defects of the published code, and what we do")
    assert rows
    for defect, where, here in rows:
        assert re.search(r"published|[Dd]ual-mode file|RGB/NIR/TIR module|DeMo", where), defect
        assert re.search(r"`[^`]*(\.py|[(_][^`]*)`", where), f"{defect}: no file or call is named"
        assert here, defect


def test_names_of_the_second_version_lead_to_files() -> None:
    rows = table("Names of the paper's second version")
    text = " ".join(cell for row in rows for cell in row)
    for name in (
        "Dual-Granularity Semantic Calibration",
        "Holistic Visual-Linguistic Anchor",
        "Salience-Guided Metric Aggregation",
        "SDTPS",
        "HRPA",
    ):
        assert name in text
    files = re.findall(r"`(method/\w+\.py)`", text)
    assert files and all((ROOT / "src/seps" / file).is_file() for file in files)


def straight_through(scores: torch.Tensor, kept: int) -> torch.Tensor:
    """D as the dual-mode file makes it with Gumbel: hard top-K with the gradient of a softmax over all N."""
    soft = torch.softmax(scores - torch.log(-torch.log(torch.rand_like(scores) + 1e-9) + 1e-9), dim=1)
    hard = torch.zeros_like(scores).scatter(1, scores.topk(kept).indices, 1.0)
    return hard + (soft - soft.detach())


def test_gumbel_has_no_effect_where_d_reaches_the_ratio_loss_alone() -> None:
    scores = torch.rand(4, 196, requires_grad=True)
    decision = straight_through(scores, 98)
    (gradient,) = torch.autograd.grad((decision.mean() - 0.3) ** 2, scores)
    assert gradient.abs().max() < 1e-8
    (weighed,) = torch.autograd.grad((straight_through(scores, 98) * torch.randn(4, 196)).sum(), scores)
    assert weighed.abs().max() > 1e-4  # used otherwise, D has a gradient


def test_gumbel_explodes_where_d_is_the_mask() -> None:
    """Through the softmax of `logits - (1 - D) * 1e10`: nothing forward, 1e10 times D's gradient backward."""
    scores = torch.rand(4, 64, requires_grad=True)
    decision, kept = straight_through(scores, 32), scores.topk(32).indices
    logits, values = torch.randn(4, 25, 32), torch.randn(4, 32, 8)
    masked = logits - (1 - decision.gather(1, kept))[:, None] * 1e10
    assert torch.equal(masked, logits)
    (gradient,) = torch.autograd.grad((masked.softmax(dim=2) @ values).square().mean(), scores)
    assert gradient.abs().max() > 1e4


def test_the_ratio_loss_is_the_constant_that_the_page_prints() -> None:
    for patches in (196, 49):
        masks = [
            torch.zeros(3, patches).scatter(1, torch.rand(3, patches).topk(math.ceil(patches / 2)).indices, 1.0)
        ] * 2
        share = math.ceil(patches / 2) / patches
        published = (masks[0] + masks[1]).mean() - 0.5
        assert torch.isclose(published**2, torch.tensor((2 * share - 0.5) ** 2))
        if patches == 196:
            assert float(published**2) == 0.25 and float((masks[0].mean() - 0.5) ** 2) == 0


def test_a_grid_of_16_by_8_is_taken_for_one_with_cls() -> None:
    def squares(tokens: int) -> bool:
        return int(math.sqrt(tokens)) ** 2 == tokens

    assert squares(196) and not squares(197) and not squares(16 * 8)


def test_no_page_prints_a_line_count() -> None:
    """It changes with every docstring."""
    assert [page.name for page in PAGES if re.search(r"\.py \(\d+ lines\)", page.read_text(encoding="utf-8"))] == []
