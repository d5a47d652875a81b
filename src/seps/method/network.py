"""The composed network: guide -> select -> aggregate -> align (Eq. 1-5), for all pairs of images and texts.

This is the readable form: what depends on the image alone is computed once (`encode_images`), then one text at a
time is scored against all images (`score_text`). `seps.scoring` computes the same scores without the loop over texts.

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

from seps.method.align import HRPA
from seps.method.checks import (
    InputError,
    check_features,
    check_one_each,
    check_patch_count,
    check_patch_mask,
    is_compiling,
    length_mask,
    unwrapped,
)
from seps.method.config import Branch, SlimmingConfig
from seps.method.encoded import ImageSide, TextScore
from seps.method.parts import (
    Guides,
    IdeaPart,
    OwnAggregation,
    OwnAlignment,
    OwnDecision,
    check_decision,
    checked_result,
    own_part,
)
from seps.method.precision import float_matmul
from seps.method.score import combine_scores, cosine_attention, masked_mean
from seps.method.select import TokenSparse, extra_token
from seps.method.tokens import DualTokenAggregation, TokenAggregation, merge
from seps.registry import FORMS, OWN


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

    Args:
        config: see `SlimmingConfig`.
        scoring, decision, aggregation, alignment: ideas of your own, as objects: what `seps.register_scoring` and the
            others take, a function or a module ready to be called. The option of the configuration is then "own".
    """

    count_remedy = "Set num_patches and num_prefix_tokens to what the encoder gives."
    """What the error about a wrong number of tokens advises."""

    def __init__(
        self,
        config: SlimmingConfig,
        *,
        scoring: IdeaPart | None = None,
        decision: IdeaPart | None = None,
        aggregation: IdeaPart | None = None,
        alignment: IdeaPart | None = None,
    ) -> None:
        super().__init__()
        given = {"scoring": scoring, "decision": decision, "aggregation": aggregation, "alignment": alignment}
        objects: dict[str, Any] = {kind: OWN for kind, part in given.items() if part is not None}
        self.config = config = replace(config, **objects) if objects else config
        self.forms: dict[str, str | None] = {}
        self.sparse_net_cap = self._sparse_net(decision)
        if config.uses_dense_branch:
            self.sparse_net_long = self._sparse_net(decision)
        self.own_scoring = self._own("scoring", scoring)
        self.aggr_net: TokenAggregation | DualTokenAggregation | OwnAggregation
        own = self._own("aggregation", aggregation)
        if own is not None:
            self.aggr_net = OwnAggregation(own, self.forms["aggregation"], config.num_merged)
        elif config.aggregation == "dual":
            self.aggr_net = DualTokenAggregation(config.embed_size, config.num_merged)
        else:
            self.aggr_net = TokenAggregation(config.embed_size, config.num_merged)
        own, leaky = self._own("alignment", alignment), config.similarity == "leaky"
        if own is not None:
            self.hrpa: HRPA = OwnAlignment(own, self.forms["alignment"], config.embed_size, scan=leaky)
        else:
            topk = config.alignment == "topk"
            self.hrpa = HRPA(config.embed_size, top_k=config.top_k, use_paper_version=topk, scan=leaky)
        self.guides = Guides(config)
        if config.dense == "tokens":
            self.trust = nn.Parameter(torch.zeros(()))

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **options: Any) -> Any:
        """As `nn.Module.load_state_dict`; a checkpoint saved from `DataParallel` loads as well."""
        return super().load_state_dict(unwrapped(state_dict), *args, **options)

    def _own(self, kind: str, given: IdeaPart | None) -> IdeaPart | None:
        """The idea that stands for an option, None for a built-in one; its form goes to `forms`."""
        part, form = own_part(kind, self.config, given)
        if part is not None:
            self.forms[kind] = form
        return part

    def _sparse_net(self, decision: IdeaPart | None = None) -> TokenSparse:
        config, own = self.config, self._own("decision", decision)
        if own is not None:
            return OwnDecision(own, config)
        return TokenSparse(
            config.embed_size,
            config.sparse_ratio,
            config.scoring == "learned",
            decision=config.decision,  # type: ignore[arg-type]
            temperature=config.temperature,
            sharpness=config.sharpness,
        )

    def _branch_net(self, name: str) -> TokenSparse:
        return self.sparse_net_cap if name == "caption" else self.sparse_net_long

    def _logits(self, patches: Tensor, name: str) -> Tensor:
        if isinstance(self.aggr_net, DualTokenAggregation):
            return self.aggr_net.logits(patches, name)  # (B, N, C) -> (B, N, Q)
        return self.aggr_net.logits(patches)  # (B, N, C) -> (B, N, Q)

    @property
    def description_weight(self) -> Tensor:
        """g of `S = (1 - g) S_patches + g S_words`, in (0, 1)."""
        return torch.sigmoid(self.trust.float())

    def prefix_count(self, num_tokens: int) -> int:
        """How many of an image's `num_tokens` tokens are prefix tokens such as CLS."""
        return self.config.num_prefix_tokens

    def encode_images(
        self,
        images: Tensor,
        *,
        dense: Tensor | None = None,
        dense_lengths: Tensor | Sequence[int] | None = None,
        guides: Mapping[str, Tensor] | None = None,
        patch_mask: Tensor | None = None,
    ) -> ImageSide:
        """Compute once per image what no caption changes.

        Args:
            images: (B, P + N, C) prefix tokens first, then the patches.
            dense: (B, L, C) word features of each image's own description.
            dense_lengths: (B,) valid words of each; 0 marks an image without description.
            guides: further guidance vectors (B, C), one per image for each name in `config.extra_guides`.
            patch_mask: (B, N) bool, False at padding patches.
        """
        config = self.config
        prefix, patches = self._prefix_and_patches(images)  # (B, P, C), (B, N, C)
        if patch_mask is not None:
            check_patch_mask(patch_mask, patches)
        dense_words = dense_mask = None
        if dense is not None and config.dense != "none":
            check_features("dense", dense, "images, words, width", config.embed_size)
            check_one_each(dense, images.shape[0])
            dense_mask = length_mask("dense_lengths", dense_lengths, dense, allow_empty=True)  # (B, L)
        if dense is not None and config.dense == "tokens":
            dense_words = F.normalize(dense.float(), dim=-1)  # (B, L, C)
        self.check_guides(guides, images.shape[0])
        attentions = self._attentions(patches, patch_mask, dense, dense_mask, guides or {})  # each (B, N)
        # Without any description an independent second branch has nothing to go by, and is left out.
        branches = config.branches[:1] if config.dense == "branch" and dense is None else config.branches
        return ImageSide(
            prefix=prefix,
            patches=patches,
            valid=patch_mask,
            fixed_scores={b.name: self._fixed_scores(b, patches, attentions, patch_mask) for b in branches},
            full_score=self._full_score(images, attentions, dense_mask),
            logits={branch.name: self._logits(patches, branch.name) for branch in branches},
            pooled=F.normalize(masked_mean(patches, patch_mask), dim=-1),
            dense_words=dense_words,
            dense_mask=dense_mask,
            attentions=attentions if self._scores_each_caption else {},
        )

    def _prefix_and_patches(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """The two kinds of tokens, in the network's dtype: (B, P + N, C) -> (B, P, C), (B, N, C)."""
        check_features("images", images, "images, tokens, width", self.config.embed_size)
        images = images.to(self.aggr_net.scale.dtype)  # (B, P + N, C)
        count = self.prefix_count(images.shape[1])
        if images.shape[1] <= count:
            raise InputError(
                f"images holds {images.shape[1]} tokens, of which {count} are prefix tokens; no patch is left. "
                "Check num_prefix_tokens."
            )
        if self.config.check_num_patches:
            check_patch_count("images", images, count, self.config.num_patches, self.count_remedy)
        patches = images[:, count:]  # (B, N, C)
        return images[:, :count], patches.detach() if self.config.detach_patches else patches  # (B, P, C), (B, N, C)

    def _attentions(
        self,
        patches: Tensor,
        valid: Tensor | None,
        dense: Tensor | None,
        dense_mask: Tensor | None,
        guides: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:
        """By guide the cosines (B, N) of its vector (B, C) with the patches (B, N, C); all guides but the caption."""
        vectors = {"image": masked_mean(patches, valid)}  # each (B, C)
        if dense is not None and dense_mask is not None:
            vectors["dense"] = masked_mean(dense, dense_mask)
        vectors.update(self.guides(patches, guides))
        return {name: cosine_attention(patches, vector) for name, vector in vectors.items()}

    @property
    def _scores_each_caption(self) -> bool:
        """Whether a scoring of somebody's own is called anew for each caption."""
        return self.own_scoring is not None and self.forms["scoring"] != FORMS["scoring"]

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

    def _fixed_scores(
        self, branch: Branch, patches: Tensor, attentions: Mapping[str, Tensor], valid: Tensor | None
    ) -> Tensor:
        if self.own_scoring is not None:
            return self._own_scores(branch, patches, attentions, valid)  # (B, N)
        return combine_scores(  # (B, N)
            attentions,
            branch.guides,
            predicted_BN=self._branch_net(branch.name).predict(patches),
            predictor_weight=branch.predictor_weight,
            normalise=self.config.scoring == "learned",
            valid_BN=valid,
        )

    def _own_scores(
        self, branch: Branch, patches: Tensor, attentions: Mapping[str, Tensor], valid: Tensor | None
    ) -> Tensor:
        """The scores (B, N) of somebody's own scoring, from the guides of one branch."""
        chosen = {name: attentions[name] for name in branch.guides if name in attentions}  # each (B, N)
        found = self.own_scoring(patches, chosen, branch.guides, valid) if self.own_scoring is not None else None
        return checked_result("The scoring", found, tuple(patches.shape[:2])).float()  # (B, N)

    def _full_score(self, images: Tensor, attentions: Mapping[str, Tensor], dense_mask: Tensor | None) -> Tensor:
        branch = self.config.branches[0]
        present = {"caption", *attentions} - {"dense"}
        total = branch.predictor_weight + sum(w for name, w in branch.guides.items() if name in present)
        if dense_mask is None:
            return torch.full((images.shape[0], 1), total, device=images.device)  # (B, 1)
        return total + branch.guides.get("dense", 0.0) * dense_mask.any(dim=-1, keepdim=True).float()  # (B, 1)

    def decide(self, side: ImageSide, branch: Branch, scores: Tensor) -> Tensor:
        """D (B, N) for the scores (B, N) of one branch."""
        keep = self._branch_net(branch.name).decide(scores, side.valid, side.full_score)  # (..., N)
        if self.forms.get("decision") is not None and not self.training and not is_compiling():
            check_decision(self.config.decision, keep)
        return keep

    def patch_scores(self, side: ImageSide, branch: Branch, caption_BC: Tensor) -> Tensor:
        """s of Eq. 3 for captions with the mean word `caption_BC` ((B or 1, C)): (B, N)."""
        if not branch.guides.get("caption"):
            return side.fixed_scores[branch.name]  # (B, N)
        attention = cosine_attention(side.patches, caption_BC)  # (B, N, C) -> (B, N)
        if self._scores_each_caption:
            attentions = {**side.attentions, "caption": attention}  # each (B, N)
            return self._own_scores(branch, side.patches, attentions, side.valid)  # (B, N)
        return self.guided(side, branch, {"caption": attention})  # (B, N)

    def guided(self, side: ImageSide, branch: Branch, attentions: Mapping[str, Tensor]) -> Tensor:
        """s of Eq. 3: the part of the image, and the guides that come with texts, by name their cosines (..., B, N)."""
        return combine_scores(  # (..., N)
            attentions,
            branch.guides,
            fixed_BN=side.fixed_scores[branch.name],
            normalise=self.config.scoring == "learned",
            valid_BN=side.valid,
        )

    def image_tokens(self, side: ImageSide, caption_BC: Tensor) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        """The tokens that are aligned with the words, L2-normalised, and D of each branch.

        One (B, P + Q + 1, C) tensor, or two where `dense="branch"` keeps the branches apart. With two kept sets in one
        tensor (`aggregation="dual"`) the merged patches are added, and the extra token is the mean of both.
        """
        prefix, patches = side.prefix.float(), side.patches.float()  # (B, P, C), (B, N, C)
        merged, extras, masks = [], [], []
        for branch in self.config.branches:
            if branch.name not in side.fixed_scores:
                continue
            scores = self.patch_scores(side, branch, caption_BC)  # (B, N)
            keep = self.decide(side, branch, scores)  # (B, N)
            merged.append(self._merge(patches, side.logits[branch.name], keep, scores))
            extras.append(extra_token(patches, scores, keep, side.valid))
            masks.append(keep)
        if self.config.aggregation == "dual":
            merged = [torch.stack(merged).sum(dim=0)]  # each (B, Q, C)
            extras = [torch.stack(extras).mean(dim=0)]  # each (B, 1, C)
        groups = [torch.cat([prefix, *pair], dim=1) for pair in zip(merged, extras, strict=True)]  # each (B, K, C)
        return [F.normalize(group, dim=-1) for group in groups], tuple(masks)

    def _merge(self, patches: Tensor, logits: Tensor, keep: Tensor, scores: Tensor) -> Tensor:
        if isinstance(self.aggr_net, OwnAggregation):
            return self.aggr_net.merged(patches, logits, keep, scores)  # (B, Q, C)
        return merge(patches, logits, keep)  # (B, N, C) -> (B, Q, C)

    def cosines(self, words_MC: Tensor, tokens_BKC: Tensor) -> Tensor:
        """Cosines of normalised words and tokens: (M, C) or (B, M, C), (B, K, C) -> (B, M, K)."""
        return float_matmul(words_MC, tokens_BKC.transpose(1, 2))  # (M, C), (B, K, C) -> (B, M, K)

    def pooled_score(self, image_BC: Tensor, caption_TC: Tensor) -> Tensor:
        """The pooled part of S: `pooled` times the cosine of an image's mean (B, C) and a mean word (T, C), (B, T)."""
        return self.config.pooled * float_matmul(F.normalize(image_BC, dim=-1), F.normalize(caption_TC, dim=-1).T)

    def _pooled_pairs(self, image_BC: Tensor, caption_BC: Tensor) -> Tensor:
        """`pooled_score` of image i with caption i alone: (B, C), (B, C) -> (B,)."""
        return self.config.pooled * (F.normalize(image_BC, dim=-1) * F.normalize(caption_BC, dim=-1)).sum(dim=-1)

    def score_text(self, side: ImageSide, words: Tensor, mask: Tensor | None = None) -> TextScore:
        """Score one caption, words (M, C) with `mask` (M,) bool, against the B images of `side`: S (B,).

        Or B pairs, a caption for each image: words (B, M, C) with `mask` (B, M).

        Flow::

            mean word (1, C) -> select and merge (Eq. 1-4) -> image tokens (B, K, C), L2-normalised
            cosines of words and tokens (B, M, K) -> align (Eq. 5) -> S_patches (B,), + pooled cosine
            cosines of words and description words (B, M, L) -> align -> S_words (B,), + pooled cosine
            S = (1 - g) S_patches + g S_words      with `dense="tokens"`; S_patches for an image without description
        """
        batch = side.patches.shape[0]
        one_caption = words.dim() == 2
        word_mask = mask[None, :] if mask is not None and one_caption else mask  # (M,) -> (1, M)
        caption = masked_mean(words[None] if one_caption else words, word_mask)  # (M, C) -> (1, C)
        unit_words = F.normalize(words.float(), dim=-1)  # (M, C)
        groups, masks = self.image_tokens(side, caption)

        def pooled(mean: Tensor) -> Tensor:
            return self.pooled_score(mean, caption).squeeze(1) if one_caption else self._pooled_pairs(mean, caption)

        expanded = None if word_mask is None else word_mask.expand(batch, -1)  # (1, M) -> (B, M)
        similarity = self._align_patches(side, groups, unit_words, expanded) + pooled(side.pooled)  # (B,)
        if side.dense_words is None or side.dense_mask is None:
            return TextScore(similarity, masks)
        # An image without description is judged by its patches alone, on the same scale. Its row is computed
        # on padding and thrown away: a row of masked values alone would leave NaN in the gradients.
        has_text = side.dense_mask.any(dim=-1, keepdim=True)  # (B, L) -> (B, 1)
        cosines = self.cosines(unit_words, side.dense_words)  # (M, C), (B, L, C) -> (B, M, L)
        described = self.hrpa.align(cosines, expanded, side.dense_mask | ~has_text)  # (B, M, L) -> (B,)
        described = described + pooled(masked_mean(side.dense_words, side.dense_mask))  # (B,)
        return TextScore(self.mix(side, similarity, described), masks, similarity, described)

    def mix(self, side: ImageSide, patches: Tensor, description: Tensor) -> Tensor:
        """`(1 - g) S_patches + g S_words`, (B,) or (B, T); an image without description keeps S_patches."""
        mixed = patches + self.description_weight * (description - patches)  # (...)
        if side.described is None:  # the descriptions come with the captions, as published
            return mixed
        described = side.described if patches.dim() == 1 else side.described[:, None]
        return torch.where(described, mixed, patches)  # (...)

    def _align_patches(
        self, side: ImageSide, groups: Sequence[Tensor], unit_words: Tensor, word_mask: Tensor | None
    ) -> Tensor:
        """S of the words with the tokens (B, K, C) of each branch, summed: (M, C) -> (B,)."""
        scores = [self.hrpa.align(self.cosines(unit_words, group), word_mask) for group in groups]  # each (B,)
        if self.config.dense == "branch" and len(scores) == 2 and side.described is not None:
            # The second branch is the description's: without one it has nothing to say.
            scores[1] = torch.where(side.described, scores[1], 0.0)
        return torch.stack(scores).sum(dim=0)  # (B,)

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
        word_mask = length_mask("lengths", lengths, words)  # (T, M)
        words = words.to(self.aggr_net.scale.dtype)  # (T, M, C)
        side = self.encode_images(
            images, dense=dense, dense_lengths=dense_lengths, guides=guides, patch_mask=patch_mask
        )
        if not len(words):
            nothing = side.pooled.new_zeros(images.shape[0], 0)  # (B, 0)
            masks = tuple(side.pooled.new_zeros(0, *side.patches.shape[:2]) for _ in side.fixed_scores)
            return (nothing, masks) if self.training else nothing  # (B, 0), ...
        scored = [self.score_text(side, text, mask) for text, mask in zip(words, word_mask, strict=True)]
        return self.collect(scored)  # (B, T), ...

    def collect(self, scored: Sequence[TextScore]) -> Tensor | tuple[Tensor, tuple[Tensor, ...]]:
        """Stack the scores of T texts, each (B,), into what `forward` returns: (B, T), in training with the masks."""
        similarity = torch.stack([one.similarity for one in scored], dim=1)  # (B, T)
        if not self.training:
            return similarity
        return similarity, tuple(torch.stack(masks) for masks in zip(*(one.masks for one in scored), strict=True))
