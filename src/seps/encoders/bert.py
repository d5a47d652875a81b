"""BERT (Devlin et al. 2019) without importing transformers, which takes longer than a search.

The embedded text encoder, MiniLM-L6, is a BERT. Weights, names and values are those of transformers' `BertModel`
without its pooling (tests/encoders/test_bert.py compares both).

Shapes: B texts, L tokens, H heads, C width.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from seps.files import load_json
from seps.products import Linear, linear_gelu

from .weights import EncoderUnavailable, first_line


@dataclass(frozen=True)
class BertConfig:
    """What a BERT's `config.json` says of its shape; the names are those of transformers."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    initializer_range: float = 0.02
    pad_token_id: int = 0
    hidden_act: str = "gelu"
    model_type: str = "bert"

    @classmethod
    def read(cls, folder: Path) -> BertConfig:
        """From a folder's `config.json`. Raises EncoderUnavailable for one that is not a plain BERT's."""
        path = folder / "config.json"
        try:
            values = load_json(path)
            found = cls(**{part.name: values[part.name] for part in dataclasses.fields(cls) if part.name in values})
        except (OSError, ValueError, TypeError) as error:
            raise EncoderUnavailable(f"{path} is not the configuration of a BERT ({error}).") from error
        plain = values.get("position_embedding_type", "absolute") == "absolute" and not values.get("is_decoder")
        if (found.model_type, found.hidden_act, plain) != ("bert", "gelu", True):
            raise EncoderUnavailable(f"{path} is not the configuration of a plain BERT.")
        return found

    def save(self, folder: Path) -> None:
        """Write `config.json`, so that transformers builds the same model from it."""
        folder.mkdir(parents=True, exist_ok=True)
        values = {**dataclasses.asdict(self), "architectures": ["BertModel"]}
        (folder / "config.json").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


class BertOutput(NamedTuple):
    """What `Bert` returns."""

    last_hidden_state: Tensor
    """(B, L, C)."""


class _Linear(Linear):
    """Without random values, which take longer to draw than the weights to read."""

    def reset_parameters(self) -> None:
        pass


class _Embedding(nn.Embedding):
    """As `_Linear`."""

    def reset_parameters(self) -> None:
        pass


class Bert(nn.Module):
    """Token ids to features, one per token: `bert(input_ids, attention_mask).last_hidden_state`.

    Its matrices hold nothing yet: `load_bert` reads them, or draws them.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = _Embeddings(config)
        layers = nn.ModuleList(_Layer(config) for _ in range(config.num_hidden_layers))
        self.encoder = nn.ModuleDict({"layer": layers})

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> BertOutput:
        """Ids and mask (B, L), 1 or True where a token is valid."""
        features = self.embeddings(input_ids)
        mask = _attended(attention_mask)
        for layer in cast(nn.ModuleList, self.encoder["layer"]):
            features = layer(features, mask)
        return BertOutput(features)

    def get_input_embeddings(self) -> nn.Module:
        """The vectors of the words of the vocabulary."""
        return self.embeddings.word_embeddings


def _attended(mask: Tensor) -> Tensor | None:
    """(B, 1, L, L) bool; None where every token may be attended to, which has faster kernels."""
    length = mask.shape[1]
    if not torch.compiler.is_compiling() and not torch._C._get_tracing_state() and bool(mask.all()):
        return None
    return mask.bool()[:, None, None, :].expand(-1, 1, length, -1)


class _Embeddings(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.word_embeddings = _Embedding(config.vocab_size, width, padding_idx=config.pad_token_id)
        self.position_embeddings = _Embedding(config.max_position_embeddings, width)
        self.token_type_embeddings = _Embedding(config.type_vocab_size, width)
        self.LayerNorm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)[None]
        features = self.word_embeddings(ids) + self.token_type_embeddings(torch.zeros_like(ids))
        normed: Tensor = self.dropout(self.LayerNorm(features + self.position_embeddings(places)))
        return normed


class _SelfAttention(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.heads, self.drop = config.num_attention_heads, config.attention_probs_dropout_prob
        self.query = _Linear(width, width)
        self.key = _Linear(width, width)
        self.value = _Linear(width, width)

    def forward(self, features: Tensor, mask: Tensor | None) -> Tensor:
        shape = (*features.shape[:-1], self.heads, -1)
        query, key, value = (part(features).view(shape).transpose(1, 2) for part in (self.query, self.key, self.value))
        drop = self.drop if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=drop)
        return mixed.transpose(1, 2).reshape(features.shape)


class _AddNorm(nn.Module):
    """Linear, dropout, the residual added, layer norm."""

    def __init__(self, inputs: int, config: BertConfig) -> None:
        super().__init__()
        self.dense = _Linear(inputs, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, features: Tensor, residual: Tensor) -> Tensor:
        normed: Tensor = self.LayerNorm(self.dropout(self.dense(features)) + residual)
        return normed


class _Layer(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        # The names of transformers' modules are the names of the tensors.
        self.attention = nn.ModuleDict({"self": _SelfAttention(config), "output": _AddNorm(width, config)})
        self.intermediate = nn.ModuleDict({"dense": _Linear(width, inner)})
        self.output = _AddNorm(inner, config)

    def forward(self, features: Tensor, mask: Tensor | None) -> Tensor:
        attended = self.attention["output"](self.attention["self"](features, mask), features)
        found: Tensor = self.output(linear_gelu(attended, cast(nn.Linear, self.intermediate["dense"])), attended)
        return found


def own_tensors(saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a published BERT that `Bert` has: without its pooling and without computed constants."""
    return {
        name: value
        for name, value in saved.items()
        if name.startswith(("embeddings.", "encoder.")) and not name.endswith("position_ids")
    }


def load_bert(folder: Path, *, pretrained: bool = True) -> Bert:
    """The BERT of a folder, float32, in eval mode; with `pretrained=False` random weights.

    Raises EncoderUnavailable for a folder whose files are missing, damaged or of another model.
    """
    config = BertConfig.read(folder)
    if not pretrained:
        made = Bert(config)
        _initialise(made)
        return made.eval()
    from safetensors.torch import load_file

    model = Bert(config)
    try:
        saved = own_tensors(load_file(folder / "model.safetensors"))
        # Copies all: one tensor that is not would keep the whole file in memory.
        tensors = {name: value.to(torch.float32, copy=True) for name, value in saved.items()}
        model.load_state_dict(tensors, assign=True)
    except Exception as error:  # a broken header, a missing file, other shapes: several types
        raise EncoderUnavailable(
            f"The weights in {folder} cannot be loaded as bert: {first_line(error)}. Download or save the model again."
        ) from error
    return model.eval()


@torch.no_grad()
def _initialise(model: Bert) -> None:
    """Random weights as BERT starts with."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight.normal_(0.0, model.config.initializer_range)
        if isinstance(module, nn.Linear):
            module.bias.zero_()
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            module.weight[module.padding_idx].zero_()
