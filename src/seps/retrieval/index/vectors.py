"""One vector an image and a query, so that a vector index finds the candidates that are then scored exactly.

For the slimming head the dot product of both vectors is the pooled part of the score, up to its weight:
`(1 - g) cos(mean patch, mean word) + g cos(mean description word, mean word)`. So the image's vector is not scaled
to length one: its length is part of the score.

Shapes: B images, P prefix tokens, N patches, M words, L description words, C width.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor
from torch.nn import functional as F

from seps.nn.guidance import masked_mean
from seps.retrieval.heads import ImageFeatures, SlimmingHead, TextFeatures
from seps.retrieval.model import RetrievalModel


def image_vectors(model: RetrievalModel, images: ImageFeatures) -> Tensor:
    """(B, C) float32: what of each image a vector index searches."""
    patches = F.normalize(images.tokens[:, model.vision.num_prefix_tokens :].float().mean(dim=1), dim=-1)
    if images.dense is None or images.dense_mask is None or not model.head.uses_description:
        return patches
    described = F.normalize(masked_mean(F.normalize(images.dense.float(), dim=-1), images.dense_mask), dim=-1)
    if not model.head.uses_pixels:
        return described
    weight = model.description_weight
    if weight is None:
        return patches
    mixed = (1 - weight) * patches + weight * described
    return torch.where(images.dense_mask.any(dim=1, keepdim=True), mixed, patches)


def text_vectors(texts: TextFeatures) -> Tensor:
    """(T, C) float32: the unit mean word of each caption."""
    return F.normalize(masked_mean(texts.words, texts.mask), dim=-1)


def fixed_patch_scores(model: RetrievalModel, images: ImageFeatures) -> Tensor:
    """(B, N): how much each patch matters whatever the caption, to keep the best at indexing time."""
    if isinstance(model.head, SlimmingHead):
        side = model.head.net.encode_images(images.tokens, dense=images.dense, dense_lengths=images.dense_lengths)
        return side.fixed_scores["caption"]
    patches = images.tokens[:, model.vision.num_prefix_tokens :].float()
    return F.cosine_similarity(patches, patches.mean(dim=1, keepdim=True), dim=-1)


def model_hash(model: RetrievalModel) -> str:
    """Hex digest of all weights, by name: two models of one digest give one image the same state."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
