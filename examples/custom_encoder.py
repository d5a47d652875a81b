"""Your own image encoder in a retrieval model: three numbers and one method, then it trains, scores, saves and loads.

`VisionEncoder` asks for the width, the number of prefix tokens, the stride of the patches and `encode`. The model
takes the encoder as an object; everything else (head, loss, saving) works as for any other encoder. It prints the loss
of twenty steps on four coloured pictures, which picture each sentence finds afterwards, and that a saved copy agrees.
"""

import tempfile

import torch
from torch import nn

from seps.encoders import Preprocessing, VisionEncoder
from seps.method.losses import InfoNCELoss
from seps.retrieval.config import ModelConfig
from seps.retrieval.heads import ImageFeatures
from seps.retrieval.model import RetrievalModel
from seps.retrieval.pretrained import from_pretrained, save_pretrained

COLOURS = {"red": (0.9, 0.1, 0.1), "green": (0.1, 0.8, 0.2), "blue": (0.1, 0.2, 0.9), "yellow": (0.9, 0.9, 0.1)}


class MyEncoder(VisionEncoder):
    """Patches of 16 x 16 pixels through one convolution; no CLS token."""

    def __init__(self, image_size: tuple[int, int] = (64, 64)) -> None:
        super().__init__(
            width=48,
            num_prefix_tokens=0,
            image_size=image_size,
            stride=(16, 16),
            preprocessing=Preprocessing(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)),
        )
        self.patches = nn.Conv2d(3, 48, kernel_size=16, stride=16)

    def encode(self, normalised: torch.Tensor) -> torch.Tensor:
        """Normalised pixels (B, 3, H, W) -> tokens (B, h * w, 48)."""
        return torch.relu(self.patches(normalised)).flatten(2).transpose(1, 2)


def pictures() -> torch.Tensor:
    """Four grey pictures with one coloured corner each: (4, 3, 64, 64) in [0, 1]."""
    pixels = torch.full((4, 3, 64, 64), 0.5)
    for picture, colour in zip(pixels, COLOURS.values(), strict=True):
        picture[:, :32, :32] = torch.tensor(colour)[:, None, None]
    return pixels


def main() -> None:
    torch.manual_seed(0)
    # The names only say what it is: the vision encoder comes as an object, the text encoder by its preset.
    model = RetrievalModel(ModelConfig(vision="my encoder", text="mini", embed_size=64), vision=MyEncoder())
    model.text.requires_grad_(False)
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    criterion = InfoNCELoss(temperature=0.1)
    pixels, texts = pictures(), [f"a {name} corner" for name in COLOURS]
    tokenized = model.text.tokenize(texts)
    for step in range(20):
        words = model.encode_ids(tokenized.ids, tokenized.mask)
        similarity, _ = model.head.net(model.encode_pixels(pixels), words, tokenized.mask.sum(dim=1))
        loss = criterion(similarity)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step in (0, 19):
            print(f"step {step:>2}: loss {loss.item():.3f}")
    model.eval()
    scores = score(model, pixels, texts)
    for text, best in zip(texts, scores.argmax(dim=0).tolist(), strict=True):
        print(f"{text!r:>18} finds the picture with the {list(COLOURS)[best]} corner")
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(model, folder)
        back = from_pretrained(folder, vision=MyEncoder())
    print(f"a saved copy gives the same scores: {torch.equal(score(back, pixels, texts), scores)}")


@torch.no_grad()
def score(model: RetrievalModel, pixels: torch.Tensor, texts: list[str]) -> torch.Tensor:
    """Similarities (pictures, texts)."""
    return model.score(ImageFeatures(model.encode_pixels(pixels)), model.encode_texts(texts))


if __name__ == "__main__":
    main()
