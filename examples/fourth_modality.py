"""A fourth modality: RGB, near infrared, thermal and depth guide each other's patch selection.

`MultiModalSDTPS` takes any number of sensors by name. Here a person stands in the same place in front of all four;
only depth sees it well, and through the guidance the thermal camera keeps those patches too. It prints the number
of tokens per sensor, how many of the person's patches the thermal camera keeps with and without depth, and what happens
when one sensor is absent.
"""

import torch

from seps import MultiModalSDTPS

SENSORS = ("rgb", "nir", "tir", "depth")


def scene(generator: torch.Generator) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Patches (B, 128, C) of each sensor and its global vector (B, C); the person fills patches 40 to 71."""
    person = torch.randn(64, generator=generator)
    patches = {name: torch.randn(2, 128, 64, generator=generator) for name in SENSORS}
    for name, clarity in zip(SENSORS, (0.1, 0.1, 0.15, 1.0), strict=True):
        patches[name][:, 40:72] += clarity * person
    vectors = {name: part.mean(dim=1) for name, part in patches.items()}
    vectors["depth"] = person.expand(2, -1)
    return patches, vectors


def main() -> None:
    torch.manual_seed(0)
    # The predictor's weight is 1 - (sensors - 1) beta, so that four sensors allow a beta of at most 1/3.
    net = MultiModalSDTPS(embed_dim=64, num_patches=128, sparse_ratio=0.5, aggr_ratio=0.4, modalities=SENSORS).eval()
    patches, vectors = scene(torch.Generator().manual_seed(1))
    with torch.no_grad():
        *tokens, _, _, thermal, _ = net(*patches.values(), *vectors.values())
        tokens = tokens[: len(SENSORS)]
        everywhere = torch.ones(2, dtype=torch.bool)
        present = dict.fromkeys(SENSORS, everywhere) | {"depth": ~everywhere}
        _, alone = net.slim("tir", patches, vectors, present)
    for name, part in zip(SENSORS, tokens, strict=True):
        print(f"{name:>5}: 128 patches -> {part.shape[1]} tokens of width {part.shape[2]}")
    print(f"thermal kept {int(thermal[:, 40:72].sum())} of 64 person patches with depth's guidance,")
    print(f"             {int(alone[:, 40:72].sum())} of 64 without it (a depth camera that is absent guides nothing)")


if __name__ == "__main__":
    main()
