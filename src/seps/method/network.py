"""The composed network: guide -> select -> aggregate -> align (Eq. 1-5), for all pairs of images and texts.

`PatchSlimming.score` is the method, written once: what depends on the image alone is computed once (`encode_images`),
then the best token of each word and the best word of each token are found by a `Maxima` (`seps.method.maxima`). The
reference builds every token of every pair; `seps.scoring` has faster ones.

Shapes: B images, T texts, P prefix tokens, N patches, M words of a caption, L words of a description, C width,
Q merged patches, K image tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from seps.method.checks import (
    InputError,
    check_features,
    check_one_each,
    check_patch_count,
    check_patch_mask,
    length_mask,
    unwrapped,
)
from seps.method.config import Branch, SlimmingConfig
from seps.method.encoded import EncodedImages, Kept, PatchSet, Scores, Texts
from seps.method.maxima import Maxima, ReferenceMaxima, reference_scores
from seps.method.parts import (
    Component,
    CustomMerger,
    Guides,
    checked_result,
    make_merger,
    make_pooling,
    make_selector,
    own_component,
)
from seps.method.precision import float_matmul
from seps.method.score import combine_scores, cosine_attention, masked_mean
from seps.method.select import extra_weights, num_kept
from seps.method.tokens import merge_weights
from seps.registry import CUSTOM


class PatchSlimming(nn.Module):
    """Semantic-Enhanced Patch Slimming: the similarity of every image with every text.

    Flow for one image and one caption::

        patches (N, C) -- guide (Eq. 1-3) --> scores (N) -- select --> D (N), K ones
              \\------- aggregate (Eq. 4) over the kept --> merged (Q, C), and one extra token of the discarded
        [prefix, merged, extra], each L2-normalised, against the words -- align (Eq. 5) --> S

    The image's description (`dense`) belongs to the image: it comes with the patches, guides their selection and,
    with `dense="tokens"`, its words are a second group of tokens beside the merged patches, with a learned weight g
    (`description_weight`): `S = (1 - g) S_patches + g S_words`. With `pooled`, the cosine of the mean caption word and
    the group's mean (of the patches, or of the description's words), times `pooled`, is added to S of each group.

    An image without description (`dense=None`, or length 0) scores as if descriptions did not exist, in every role
    of the description: nothing guides its selection in its place, and S is that of the caption's branch.

    To change the method, override a step (`select`, `tokens`, `pool`, `mix`, `encode_images`): `forward`, training and
    all-pairs scoring follow it.

    Args:
        config: see `SlimmingConfig`.
        scoring, decision, aggregation, alignment: custom components, as objects: what `seps.register_scoring` and the
            others take, a function or a module ready to be called. The option of the configuration is then "own".
    """

    count_remedy = "Set num_patches and num_prefix_tokens to what the encoder gives."
    """What the error about a wrong number of tokens advises."""

    def __init__(
        self,
        config: SlimmingConfig,
        *,
        scoring: Component | None = None,
        decision: Component | None = None,
        aggregation: Component | None = None,
        alignment: Component | None = None,
    ) -> None:
        super().__init__()
        given = {"scoring": scoring, "decision": decision, "aggregation": aggregation, "alignment": alignment}
        objects: dict[str, Any] = {kind: CUSTOM for kind, part in given.items() if part is not None}
        self.config = config = replace(config, **objects) if objects else config
        self.sparse_net_cap = make_selector(config, decision)
        if len(config.branches) > 1:
            self.sparse_net_long = make_selector(config, decision)
        self.own_scoring = own_component("scoring", config, scoring)
        self.aggr_net = make_merger(config, aggregation)
        self.hrpa = make_pooling(config, alignment)
        self.guides = Guides(config)
        if config.dense == "tokens":
            self.trust = nn.Parameter(torch.zeros(()))

    def extra_repr(self) -> str:
        """Settings shown by `print(module)`."""
        config = self.config
        kept = "learned" if config.decision == "binary" else num_kept(config.num_patches, config.sparse_ratio)
        beta = "" if config.scoring == "sum" else f", beta={config.beta}"
        return f"N -> K -> Q: {config.num_patches} -> {kept} -> {config.num_merged} + 1 extra token{beta}"

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **options: Any) -> Any:
        """As `nn.Module.load_state_dict`; a checkpoint saved from `DataParallel` loads as well."""
        return super().load_state_dict(unwrapped(state_dict), *args, **options)

    @property
    def description_weight(self) -> Tensor:
        """g of `S = (1 - g) S_patches + g S_words`, in (0, 1)."""
        return torch.sigmoid(self.trust.float())

    def prefix_count(self, num_tokens: int) -> int:
        """How many of an image's `num_tokens` tokens are prefix tokens such as CLS."""
        return self.config.num_prefix_tokens

    def forward(
        self,
        images: Tensor,
        words: Tensor,
        lengths: Tensor | Sequence[int] | None = None,
        *,
        dense: Tensor | None = None,
        dense_lengths: Tensor | Sequence[int] | None = None,
        guides: Mapping[str, Tensor] | None = None,
        patch_mask: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, tuple[Tensor, ...]]:
        """Similarity of every image with every caption.

        Args:
            images, dense, dense_lengths, guides, patch_mask: see `encode_images`.
            words: (T, M, C) caption words; `lengths` (T,) valid words of each.

        Returns:
            In training (similarity (B, T), masks), one mask (T, B, N) per branch; in evaluation the similarity.
        """
        check_features("words", words, "texts, words, width", self.config.embed_size)
        texts = Texts.of(words.to(self.aggr_net.scale.dtype), length_mask("lengths", lengths, words))
        encoded = self.encode_images(
            images, dense=dense, dense_lengths=dense_lengths, guides=guides, patch_mask=patch_mask
        )
        scored = reference_scores(self, encoded, texts)
        return (scored.similarity, scored.masks) if self.training else scored.similarity  # (B, T), ...

    def score(self, images: EncodedImages, texts: Texts, maxima: Maxima | None = None) -> Scores:
        """Score all pairs of images and texts: select -> maxima -> pool -> mix, each (B, T).

        `maxima` was made for these images; None: the reference, which builds every token of every pair.
        """
        maxima = ReferenceMaxima(self, images) if maxima is None else maxima
        # Step 1, select (Eq. 1-3): patches (B, N, C) and texts (T, M, C) -> D (T, B, N) of each set
        kept = self.select(images, texts)
        # With "dual" both sets are merged into the same tokens, else each into tokens of its own.
        groups = [kept] if self.config.aggregation == "dual" else zip(kept)
        pixels = None
        for group in groups:
            second = self.config.dense == "branch" and group[0].place == 1
            # The published pairing aligns the description's own words with the second set.
            words = texts.description if second and texts.description is not None else texts
            # Step 2, maxima (Eq. 4-5): merged patches and words -> best token (B, T, M), best word (B, T, K)
            best = maxima(words, group)
            # Step 3, pool (Eq. 5): both maxima -> S of the patches (B, T), and the cosine of both means
            part = self.pool(*best, words.word_mask)  # (B, T)
            if second and images.described is not None:
                # The second set is the description's: without a description it has nothing to say.
                part = torch.where(images.described[:, None], part, 0.0)  # (B, T)
            pixels = part if pixels is None else pixels + part  # (B, T)
        if pixels is None:
            raise InputError("These encoded images hold no set of patches; make them by encode_images.")
        if self.config.pooled:
            pixels = pixels + self.pooled_score(images.pooled, texts.mean)  # (B, T)
        # Step 4, mix: S of the patches (B, T) and S of the description's words (B, T) -> S (B, T)
        description = self.score_description(images, texts, maxima)  # (B or 1, T)
        similarity = pixels if description is None else self.mix(images, pixels, description)  # (B, T)
        shape = (texts.words.shape[0], *images.patches.shape[:2])
        masks: tuple[Tensor, ...] = ()
        for one in kept:
            masks += (one.keep.expand(shape),)  # each (T, B, N)
        return Scores(similarity, pixels, description, images.described, masks)

    def select(self, images: EncodedImages, texts: Texts, places: Sequence[int] | None = None) -> tuple[Kept, ...]:
        """The scores of Eq. 3 and the decision D of every pair, for each set of patches, or for those at `places`."""
        kept = []
        for place in range(len(images.sets)) if places is None else places:
            branch = self.config.branches[place]
            scores = self.patch_scores(images, texts, place)  # (T or 1, B, N)
            guided = any(map(branch.guides.get, texts.guides))
            fixed = not (guided or self.draws_noise or self.config.aggregation == "dual")
            if not fixed:
                scores = scores.expand(texts.words.shape[0], -1, -1)  # (T, B, N)
            selector = self.sparse_net_long if place else self.sparse_net_cap
            keep = selector(scores, images.valid, images.full_score)  # (T or 1, B, N)
            kept.append(Kept(scores, keep, extra_weights(scores, keep, images.valid), place, fixed))
        return tuple(kept)

    @property
    def draws_noise(self) -> bool:
        """Whether decisions are drawn at random: D differs from text to text then, and carries a gradient."""
        return self.training and self.config.decision != "topk"

    def patch_scores(self, images: EncodedImages, texts: Texts, place: int = 0) -> Tensor:
        """s of Eq. 3 for all pairs and one set, (T, B, N); (1, B, N) where no text guides it."""
        branch = self.config.branches[place]
        attentions = {}
        for name, mean in texts.guides.items():
            if branch.guides.get(name):
                attentions[name] = images.text_attention(mean)
        if not attentions:
            return images.sets[place].fixed[None]  # (B, N) -> (1, B, N)
        if self.own_scoring is not None:
            # each (T, B, N)
            fixed = {
                name: attention.expand(texts.words.shape[0], -1, -1) for name, attention in images.attentions.items()
            }
            return self._own_scores(branch, images.patches, {**fixed, **attentions}, images.valid)  # (T, B, N)
        return combine_scores(  # (T, B, N)
            attentions,
            branch.guides,
            fixed_BN=images.sets[place].fixed,
            normalise=self.config.scoring == "learned",
            valid_BN=images.valid,
        )

    def score_description(self, images: EncodedImages, texts: Texts, maxima: Maxima) -> Tensor | None:
        """S (B, T) of the words with those of the images' descriptions; None where descriptions are no tokens.

        In the published pairing descriptions come with the texts: (1, T), the same for every image.
        """
        if self.config.dense != "tokens":
            return None
        if texts.description is not None:
            return self._score_pairing(texts, texts.description)  # (1, T)
        words = images.dense_words  # (B, L, C)
        mask = images.dense_mask  # (B, L)
        if words is None or mask is None:
            return None
        # An image without description is judged by its patches alone, on the same scale. Its row is computed on
        # padding and thrown away: a row of masked values alone would leave NaN in the gradients.
        filled = mask | ~mask.any(dim=-1, keepdim=True)  # (B, L)
        score = self.pool(*maxima.beside(texts, words, filled), texts.word_mask, filled[:, None])  # (B, T)
        if not self.config.pooled:
            return score
        return score + self.pooled_score(masked_mean(words, mask), texts.mean)  # (B, T)

    def _score_pairing(self, texts: Texts, description: Texts) -> Tensor:
        """S (1, T) of each text with the words of the description that comes with it."""
        cosines = float_matmul(texts.words, description.words.transpose(-1, -2))  # (T, M, C) -> (T, M, L)
        found = self.hrpa.maxima(cosines, texts.mask, description.mask)  # (T, M), (T, L)
        score = self.pool(*found, texts.mask, description.mask)  # (T,)
        mean = F.normalize(masked_mean(description.words, description.mask), dim=-1)  # (T, C)
        return (score + self.config.pooled * (mean * texts.mean).sum(dim=-1))[None]  # (1, T)

    def pool(
        self, rows: Tensor, columns: Tensor, word_mask: Tensor | None = None, token_mask: Tensor | None = None
    ) -> Tensor:
        """S of Eq. 5 from the best token of each word (B, T, M) and the best word of each token (B, T, K): (B, T)."""
        score: Tensor = self.hrpa(rows, columns, word_mask, token_mask)  # (...)
        return score

    def pooled_score(self, image_BC: Tensor, means: Tensor) -> Tensor:
        """The pooled part of S: `pooled` times the cosine of an image's mean and a mean word.

        `means` (T, C), or (T, B, C) with texts of its own for each image; the result is (B, T).
        """
        image, words = F.normalize(image_BC, dim=-1), F.normalize(means, dim=-1)  # (B, C), (..., C)
        if means.dim() == 3:
            cosines: Tensor = (image * words).sum(dim=-1).T  # (B, T)
            return self.config.pooled * cosines  # (B, T)
        return self.config.pooled * float_matmul(image, words.T)  # (B, T)

    def mix(self, images: EncodedImages, patches: Tensor, description: Tensor) -> Tensor:
        """`(1 - g) S_patches + g S_words`, (B, T); an image without description keeps S_patches."""
        mixed = patches + self.description_weight * (description - patches)  # (B, T)
        if images.described is None:  # the descriptions come with the captions, as published
            return mixed
        return torch.where(images.described[:, None], mixed, patches)  # (B, T)

    def weights(self, images: EncodedImages, kept: Sequence[Kept]) -> Tensor:
        """How each token of a pair is made of patches, (T, B, Q + 1, N): the merged patches and the extra token.

        With two sets in one group the weights of the merged patches are added, and those of the extra token averaged.
        """
        if isinstance(self.aggr_net, CustomMerger):
            raise InputError(
                f"aggregation={self.config.aggregation!r} merges patches by itself (`merge`), so its tokens have no "
                "weights of patches; give it merge logits instead (docs/change-one-idea.md)."
            )
        total = None
        for one in kept:
            merged = merge_weights(images.sets[one.place].logits, one.keep).transpose(-1, -2)  # (T or 1, B, Q, N)
            extra = one.extra[..., None, :] / len(kept)  # (T or 1, B, 1, N)
            weights = torch.cat([merged, extra], dim=-2)  # (T or 1, B, Q + 1, N)
            total = weights if total is None else total + weights  # (T, B, Q + 1, N)
        assert total is not None
        return total  # (T, B, Q + 1, N)

    def tokens(self, images: EncodedImages, kept: Sequence[Kept]) -> Tensor:
        """The tokens of each pair that are aligned with the words, L2-normalised: (T, B, P + Q + 1, C)."""
        prefix, patches = images.prefix.float(), images.patches.float()  # (B, P, C), (B, N, C)
        if isinstance(self.aggr_net, CustomMerger):
            made = self.aggr_net.tokens(patches, kept)  # (T, B, Q + 1, C)
        else:
            weights = self.weights(images, kept)  # (T, B, Q + 1, N)
            by_image = weights.transpose(0, 1).flatten(1, 2)  # (B, T * (Q + 1), N)
            made = float_matmul(by_image, patches)  # (B, T * (Q + 1), C)
            made = made.view(patches.shape[0], *weights.shape[::2][:2], -1).transpose(0, 1)  # (T, B, Q + 1, C)
        tokens = torch.cat([prefix.expand(made.shape[0], -1, -1, -1), made], dim=2)  # (T, B, K, C)
        return F.normalize(tokens, dim=-1)  # (T, B, K, C)

    def encode_images(
        self,
        images: Tensor,
        *,
        dense: Tensor | None = None,
        dense_lengths: Tensor | Sequence[int] | None = None,
        guides: Mapping[str, Tensor] | None = None,
        patch_mask: Tensor | None = None,
    ) -> EncodedImages:
        """Compute once per image what no caption changes.

        Args:
            images: (B, P + N, C) prefix tokens first, then the patches.
            dense: (B, L, C) word features of each image's own description.
            dense_lengths: (B,) valid words of each; 0 marks an image without description.
            guides: further guidance vectors (B, C), one per image for each name in `config.extra_guides`.
            patch_mask: (B, N) bool, False at padding patches.
        """
        config = self.config
        # Step 1, tokens in the network's dtype: images (B, P + N, C) -> prefix (B, P, C), patches (B, N, C)
        check_features("images", images, "images, tokens, width", config.embed_size)
        images = images.to(self.aggr_net.scale.dtype)  # (B, P + N, C)
        count = self.prefix_count(images.shape[1])
        if images.shape[1] <= count:
            raise InputError(
                f"images holds {images.shape[1]} tokens, of which {count} are prefix tokens; no patch is left. "
                "Check num_prefix_tokens."
            )
        if config.check_num_patches:
            check_patch_count("images", images, count, config.num_patches, self.count_remedy)
        prefix, patches = images[:, :count], images[:, count:]  # (B, P, C), (B, N, C)
        if config.detach_patches:
            patches = patches.detach()  # (B, N, C)
        if patch_mask is not None:
            check_patch_mask(patch_mask, patches)
        # Step 2, guides: patches (B, N, C), description (B, L, C) -> vectors (B, C) -> cosines (B, N) (Eq. 2)
        mean = masked_mean(patches, patch_mask)  # (B, C)
        vectors = {"image": mean}  # each (B, C)
        dense_words = dense_mask = described = None
        if dense is not None and config.dense != "none":
            check_features("dense", dense, "images, words, width", config.embed_size)
            check_one_each(dense, images.shape[0])
            dense_mask = length_mask("dense_lengths", dense_lengths, dense, allow_empty=True)  # (B, L)
            described = dense_mask.any(dim=-1)  # (B, L) -> (B,)
            vectors["dense"] = masked_mean(dense, dense_mask)
            if config.dense == "tokens":
                dense_words = F.normalize(dense.float(), dim=-1)  # (B, L, C)
        if guides or config.extra_guides:
            self.check_guides(guides, images.shape[0])
            vectors.update(self.guides(patches, guides or {}))
        attentions = {}
        for name, vector in vectors.items():
            attentions[name] = cosine_attention(patches, vector)
        # Step 3, merge logits: patches (B, N, C) -> L (B, N, Q), for both sets or for each
        logits = self.aggr_net(patches)  # each (B, N, Q)
        # Step 4, fixed scores: s^p and cosines (B, N) -> their part of Eq. 3 (B, N), for each set
        # Without any description an independent second branch has nothing to go by, and is left out.
        branches = config.branches[:1] if config.dense == "branch" and dense is None else config.branches
        sets = []
        for place, branch in enumerate(branches):
            if self.own_scoring is not None:
                fixed = self._own_scores(branch, patches, attentions, patch_mask)  # (B, N)
            else:
                selector = self.sparse_net_long if place else self.sparse_net_cap
                fixed = combine_scores(  # (B, N)
                    attentions,
                    branch.guides,
                    predicted_BN=selector.predict(patches),
                    predictor_weight=branch.predictor_weight,
                    normalise=config.scoring == "learned",
                    valid_BN=patch_mask,
                )
            sets.append(PatchSet(fixed, logits[place % len(logits)]))
        weights = dict(branches[0].guides)
        described_weight = weights.pop("dense", 0.0)
        total = branches[0].predictor_weight + sum(weights.values())
        full_score = torch.full((images.shape[0], 1), total, device=images.device)  # (B, 1)
        if described is not None:
            full_score = total + described_weight * described[:, None].float()  # (B, 1)
        return EncodedImages(
            prefix=prefix,
            patches=patches,
            valid=patch_mask,
            sets=tuple(sets),
            full_score=full_score,
            pooled=F.normalize(mean, dim=-1),
            dense_words=dense_words,
            dense_mask=dense_mask,
            described=described,
            attentions={} if self.own_scoring is None else attentions,
        )

    def check_guides(self, guides: Mapping[str, Tensor] | None, batch: int) -> None:
        """Raise `InputError` unless `guides` holds one vector per image for each name in `config.extra_guides`."""
        given, wanted = set(guides or {}), set(self.guides.from_data)
        if given - wanted:
            raise InputError(
                f"guides names {sorted(given - wanted)}, which config.extra_guides gives no weight; add them there."
            )
        if wanted - given:
            raise InputError(
                f"config.extra_guides names {sorted(wanted - given)}, but guides does not hold them; pass "
                "guides={name: (images, width) vectors}, or leave the name out of extra_guides."
            )
        for name, vector in (guides or {}).items():
            width = self.config.embed_size if self.guides.part(name) is None else vector.shape[-1]
            check_features(f"guides[{name!r}]", vector, "images, width", width)
            if vector.shape[0] != batch:
                raise InputError(
                    f"guides[{name!r}] holds {vector.shape[0]} vectors for {batch} images; give one vector per image."
                )

    def _own_scores(
        self, branch: Branch, patches: Tensor, attentions: Mapping[str, Tensor], valid: Tensor | None
    ) -> Tensor:
        """The scores (..., N) of a custom scoring, from the guides of one branch."""
        chosen = {name: attentions[name] for name in branch.guides if name in attentions}  # each (..., N)
        if self.own_scoring is None:
            raise InputError("This network has no custom scoring.")
        shape = next(iter(chosen.values())).shape if chosen else patches.shape[:2]
        scores = self.own_scoring(patches, chosen, branch.guides, valid)  # (..., N)
        return checked_result("The scoring", scores, tuple(shape)).float()  # (..., N)
