"""Registered names and ideas: what is refused, with which sentence, and objects that need no name."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import nn

import seps
from ideas import SIZES, Slots, features, first, median, readable
from messages import mentions, naming
from seps import registry
from seps.method.checks import InputError
from seps.method.config import Aggregation, Alignment, ConfigError, DecisionKind, Scoring, SlimmingConfig
from seps.method.network import PatchSlimming
from seps.registry import RegistryError
from seps.scoring import choose_backend

pytestmark = pytest.mark.usefixtures("own_registry")


def test_objects_stand_for_ideas_without_a_name():
    class Keep:
        def __call__(self, scores, count, valid):
            return first(scores, count, valid)

    images, words, lengths, extras = features()
    net = PatchSlimming(SlimmingConfig(**SIZES), decision=Keep(), alignment=nn.Identity())
    assert (net.config.decision, net.config.alignment, net.config.scoring) == ("own", "own", "learned")
    seps.register_decision("first")(first)
    named = PatchSlimming(SlimmingConfig(decision="first", **SIZES))
    net = PatchSlimming(SlimmingConfig(**SIZES), decision=Keep())
    net.load_state_dict(named.state_dict())
    assert torch.equal(readable(net, images, words, lengths, extras), readable(named, images, words, lengths, extras))
    assert choose_backend(net, "cpu").backend == "factored"
    with pytest.raises(InputError, match=naming("decision='own'")):
        PatchSlimming(net.config)


def test_built_in_names_are_those_of_the_configuration():
    from seps.retrieval.config import HeadKind

    for kind, names in (
        ("scoring", Scoring),
        ("decision", DecisionKind),
        ("aggregation", Aggregation),
        ("alignment", Alignment),
        ("head", HeadKind),
    ):
        assert registry.BUILT_IN[kind] == get_args(names)


@pytest.mark.parametrize("kind", ["scoring", "decision", "aggregation", "alignment"])
def test_a_name_that_nobody_registered_is_a_sentence(kind):
    with pytest.raises(ConfigError) as caught:
        SlimmingConfig(**{kind: "mine"})
    said = str(caught.value)
    assert mentions(said, kind, "'mine'", registry.BUILT_IN[kind][0], f"@seps.register_{kind}('mine')", "--plugin")
    getattr(seps, f"register_{kind}")("other")(print)
    with pytest.raises(ConfigError, match="other"):
        SlimmingConfig(**{kind: "mine"})
    with pytest.raises(ConfigError):
        SlimmingConfig(**{kind: ["mine"]})


def test_bad_registrations_are_sentences():
    with pytest.raises(RegistryError, match="topk"):
        seps.register_decision("topk")
    with pytest.raises(RegistryError, match="registered"):
        seps.register_decision("")
    with pytest.raises(RegistryError, match="register"):
        seps.register_decision("mine")(3)
    seps.register_decision("mine")(first)
    seps.register_decision("mine")(first)  # the same one again, as in a notebook
    with pytest.raises(RegistryError, match=naming("ideas.py")):
        seps.register_decision("mine")(median)


class WithoutConfig(nn.Module):
    """A class whose author forgot that it is made with the configuration."""

    def __init__(self):
        super().__init__()

    def forward(self, patches):
        return patches


class WithConfig(nn.Module):
    """A class whose call takes what another hook is given."""

    def __init__(self, config):
        super().__init__()

    def forward(self, patches, keep, scores):
        return patches


class Merging(nn.Module):
    """A class that merges by itself, and forgets what it is given."""

    def __init__(self, config):
        super().__init__()

    def merge(self, patches):
        return patches


@pytest.mark.parametrize(
    ("register", "idea", "told"),
    [
        (lambda: seps.register_decision, first, naming("@seps.register_decision", "NAME")),
        (lambda: seps.register_encoder, first, naming("@seps.register_encoder")),
        (
            lambda: seps.register_decision("x"),
            lambda scores: scores,
            naming("(scores, count, valid)"),
        ),
        (
            lambda: seps.register_scoring("x"),
            first,
            naming("(patches, attentions, weights, valid)", "first"),
        ),
        (
            lambda: seps.register_alignment("x"),
            first,
            r"\(best, mask\), which first.*missing a required",
        ),
        (lambda: seps.register_aggregation("x"), WithoutConfig, naming("(config)", "Without")),
        (lambda: seps.register_aggregation("x"), WithConfig, r"with \(patches\), which .*missing a req"),
        (lambda: seps.register_aggregation("x"), Merging, naming("(patches, keep, scores)", "merge")),
        (lambda: seps.register_guide("x"), lambda: 0, naming("(vectors)")),
        (lambda: seps.register_head("x"), WithoutConfig, naming("'x'", "(config)")),
        (lambda: seps.register_row("x", "title"), lambda: 0, naming("'x'", "(recipe)")),
    ],
)
def test_what_cannot_be_called_is_told_where_it_is_registered(register, idea, told):
    with pytest.raises(RegistryError, match=told):
        register()(idea)
    assert not registry.registered("aggregation") and not registry.registered("decision")


def test_what_cannot_be_registered_names_what_can():
    with pytest.raises(AttributeError, match=naming("register_loss", "register_aggregation")):
        seps.register_loss  # noqa: B018


def test_what_can_be_called_is_registered():
    seps.register_decision("any")(lambda *given: given[0])
    seps.register_decision("more")(lambda scores, count, valid, sharpness=2: scores)
    seps.register_aggregation("slots")(Slots)
    seps.register_alignment("median")(median)
    assert set(registry.registered("decision")) == {"any", "more"}


@pytest.mark.parametrize(
    ("kind", "idea", "told"),
    [
        ("decision", lambda scores, count, valid: scores[:, :3], "decision"),
        ("decision", lambda scores, count, valid: None, "returned NoneType"),
        ("scoring", lambda patches, attentions, weights, valid: patches, "scoring"),
        ("aggregation", lambda patches: patches[..., :1], "shape"),
        ("alignment", lambda best, mask: best, "alignment"),
    ],
)
def test_a_result_that_does_not_fit_is_a_sentence(kind, idea, told):
    net = PatchSlimming(SlimmingConfig(dense="none", **SIZES), **{kind: idea})
    images, words, lengths, _ = features()
    with pytest.raises(InputError, match=told):
        net(images, words, lengths)
