"""Write the bank of background queries that ships with the package: src/seps/assets/bank/sentences.txt.

    python tools/bank.py STORE [STORE ...]

`bank_scenes.txt` holds scenes of everyday photos that were written for this project: who, does what, where. `compose`
makes 6,000 sentences of them. Kept are those that real photos need most: a sentence counts once for each photo of the
stores that has it among its 10 nearest. The stores hold photos that are measured nowhere, such as a training split,
one store per embedded model. No sentence comes from a data set, so the bank knows no query that is measured.
"""

from __future__ import annotations

import argparse
import random
import re
from pathlib import Path

OUT = Path(__file__).resolve().parents[1] / "src" / "seps" / "assets" / "bank" / "sentences.txt"
SCENES = Path(__file__).with_name("bank_scenes.txt")
COMPOSED = 6000
KEPT = 1564
"""Sentences of the bank; the last of them calibrate the confidence (`seps.retrieval.ranking.bank.ASKED`)."""
NEAREST = 10
"""Sentences that count for each photo."""
CLOTHED, EXTRA = 0.35, 0.15
"""Parts of the sentences that name clothes of people, and what else the photo shows."""
FORMS = ("present", "present", "progressive", "progressive", "participle")
IRREGULAR = {"have": "has", "go": "goes", "do": "does", "leave": "leaves", "are": "is"}
NO_VERBS = "with full under at on after beside behind in between surrounded covered seen".split()  # noqa: SIM905

"""First words of second parts that have no verb."""
PERSON = re.compile(
    r"\b(man|woman|boy|girl|lady|child|toddler|person|player|men|women|people|rider|worker|children|kids|couple|skier"
    r"|snowboarder|surfer|climber|hiker|cyclist|vendor|farmer|singer|dancer|teenager|friend|tourist)s?$"
)


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stores", nargs="+")
    kept = most_needed(compose(COMPOSED), parser.parse_args().stores)
    OUT.write_text("\n".join(kept) + "\n", encoding="utf-8")
    print(f"{len(kept)} sentences: {OUT}")


def most_needed(sentences: list[str], stores: list[str]) -> list[str]:
    """The `KEPT` sentences that are among the `NEAREST` of the most photos, in random order."""
    import torch

    from seps.photos.store.store import Store
    from seps.retrieval.engine.loading import load_engine

    counts = torch.zeros(len(sentences))
    for place in stores:
        store = Store.open(place)
        engine = load_engine(store.settings.model)
        texts = engine.vectors(engine.encode_texts(sentences))
        for part in store.scan(["vector"]):
            near = (torch.from_numpy(part.vectors().copy()).float() @ texts.T).topk(NEAREST).indices.flatten()
            counts += torch.bincount(near, minlength=len(sentences))
    order = counts.argsort(descending=True, stable=True)[:KEPT].tolist()
    random.Random(0).shuffle(order)
    return [sentences[i] for i in order]


def compose(count: int) -> list[str]:
    """`count` different sentences in random order, drawn with a fixed seed."""
    draw = random.Random(0)
    lists, shares = read_scenes()
    sentences: dict[str, None] = {}
    while len(sentences) < count:
        scene = draw.choices(list(shares), list(shares.values()))[0]
        sentences[sentence(scene, lists, draw)] = None
    return list(sentences)


def read_scenes() -> tuple[dict[str, list[str]], dict[str, float]]:
    """The lists by name, and the share of each scene."""
    lists, shares, share = {}, {}, 1.0
    for line in SCENES.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        if line.startswith("== "):
            share = float(line.strip("= ").rpartition(":")[2])
        elif " | " in line:
            shares[line] = share
        elif " = " in line:
            name, _, entries = line.partition(" = ")
            lists[name] = [entry.strip() for entry in entries.split("/")]
    return lists, shares


def sentence(scene: str, lists: dict[str, list[str]], draw: random.Random) -> str:
    """A sentence of a scene: one entry of each of its parts, and sometimes clothes and what else the photo shows."""

    def fill(entry: str) -> str:
        while names := re.findall(r"\{(\w+)\}", entry):
            entry = entry.replace(f"{{{names[0]}}}", draw.choice(lists[names[0]]), 1)
        return entry

    subject, verb, *others = (fill(draw.choice(part.split("/")).strip()) for part in scene.split("|"))
    plural = is_plural(subject)
    if PERSON.search(subject) and draw.random() < CLOTHED:
        subject = f"{subject} {fill('{clothes}')}"
    if draw.random() < EXTRA:
        others.append(fill("{around}"))
    words = " ".join(" ".join([subject, conjugate(verb, draw.choice(FORMS), plural), *others]).split())
    words = re.sub(r"\ba (?=[aeio]|u(?!ni))", "an ", words)
    return words[0].upper() + words[1:] + "."


def is_plural(subject: str) -> bool:
    """Whether a subject takes a plural verb."""
    several = re.search(r"\band an? |bride and groom|\bcouple\b", subject)
    return several is not None or not re.match(r"an? ", subject)


def conjugate(verb: str, form: str, plural: bool) -> str:
    """A verb phrase, written in the singular or the plural, in a form and in the number of its subject."""
    first, _, rest = verb.partition(" ")
    if first in NO_VERBS:
        return verb
    be = "are" if plural else "is"
    if first in ("is", "are"):
        return f"{be} {rest}"
    base = base_form(first)
    if form == "present":
        return f"{base if plural else singular_form(base)} {rest}"
    return f"{'' if form == 'participle' else be} {participle(base)} {rest}"


def base_form(verb: str) -> str:
    """`fly` for `flies`; a verb in the plural stays as it is."""
    if verb in IRREGULAR.values():
        return next(base for base, singular in IRREGULAR.items() if singular == verb)
    if verb in IRREGULAR or not verb.endswith("s") or verb.endswith("ss"):
        return verb
    if len(verb) > 4 and re.search(r"[^aeiou]ies$", verb):
        return verb[:-3] + "y"
    return verb[:-2] if re.search(r"(ch|sh|ss|x)es$", verb) else verb[:-1]


def singular_form(base: str) -> str:
    """`flies` for `fly`."""
    if base in IRREGULAR:
        return IRREGULAR[base]
    if re.search(r"[^aeiou]y$", base):
        return base[:-1] + "ies"
    return base + ("es" if re.search(r"(ch|sh|ss|x|z)$", base) else "s")


def participle(base: str) -> str:
    """`running` for `run`."""
    if base.endswith("ie"):
        return base[:-2] + "ying"
    if base.endswith("e") and not base.endswith("ee"):
        return base[:-1] + "ing"
    if re.fullmatch(r"[^aeiou]*(qu)?[aeiou][^aeiouwxy]", base):
        return base + base[-1] + "ing"
    return base + "ing"


if __name__ == "__main__":
    main()
