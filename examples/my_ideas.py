"""Ideas of your own for `--plugin examples/my_ideas.py`: a decision, a guide, and a row of a comparison.

Each is registered under a name, which then stands in the settings: `--model.slimming.decision gap`. It prints
what it registers, and which path scores a network with the decision.
"""

from dataclasses import replace

import torch

import seps
from seps.retrieval.config import RunConfig
from seps.scoring import choose_backend


@seps.register_decision("gap")
def keep_up_to_the_gap(scores: torch.Tensor, count: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
    """Cut where two neighbours in the ranking differ most: scores (R, N) -> D (R, N)."""
    ranked = scores.sort(dim=-1, descending=True)
    gaps = ranked.values[..., :-1] - ranked.values[..., 1:]
    lowest_kept = ranked.values.gather(-1, gaps.argmax(dim=-1, keepdim=True))
    return (scores >= lowest_kept).float()


@seps.register_guide("loudest", from_patches=True)
def loudest_patch(patches: torch.Tensor) -> torch.Tensor:
    """The patch with the largest norm guides the selection: (B, N, C) -> (B, C)."""
    return patches[torch.arange(len(patches)), patches.norm(dim=-1).argmax(dim=1)]


@seps.register_row("gap", "cuts at the largest gap", reference="default")
def cuts_at_the_gap(recipe: RunConfig) -> RunConfig:
    """The recipe with this decision, and nothing else changed."""
    return replace(recipe, model=replace(recipe.model, slimming={**recipe.model.slimming, "decision": "gap"}))


def main() -> None:
    net = seps.PatchSlimming(seps.SlimmingConfig(decision="gap", embed_size=32, num_patches=16))
    choice = choose_backend(net, "cpu")
    print("decision 'gap', guide 'loudest', row 'gap'")
    print(f"a network with this decision is scored by: {choice.backend}")


if __name__ == "__main__":
    main()
