"""Scenes in words, worded differently each time. What a caption says is true of its scene; it may leave things out."""

from __future__ import annotations

import random

from training.scenes import LETTERS, Scene, Thing

SIZE_WORDS = {"small": ("small", "tiny", "little"), "medium": ("medium",), "large": ("large", "big", "huge")}
TEXTURE_WORDS = {
    "striped": ("striped", "stripy"),
    "dotted": ("dotted", "spotted"),
    "checkered": ("checkered", "checked"),
}
COLOUR_WORDS = {"gray": ("gray", "grey"), "purple": ("purple", "violet"), "cyan": ("cyan", "turquoise")}
SHAPE_WORDS = {"circle": ("circle", "disc"), "diamond": ("diamond", "rhombus"), "cross": ("cross", "plus")}
NUMBER_WORDS = {2: ("two", "2"), 3: ("three", "3"), 4: ("four", "4")}
RELATION_WORDS = {
    "left": ("to the left of", "left of", "on the left of"),
    "right": ("to the right of", "right of", "on the right of"),
    "above": ("above", "over"),
    "below": ("below", "under", "beneath"),
}
CENTER_WORDS = ("in the center", "in the middle", "at the center")
EDGE_WORDS = {
    "left": ("on the left", "on the left side", "at the left"),
    "right": ("on the right", "on the right side", "at the right"),
    "top": ("at the top", "near the top"),
    "bottom": ("at the bottom", "near the bottom"),
}
OPENINGS = ("a picture of", "an image of", "a drawing of", "there is", "a photo of", "picture with")
PLURALS = {"cross": "crosses", "plus": "pluses", "rhombus": "rhombuses"}
UPPER = {"top": "upper", "bottom": "lower"}


def _article(phrase: str) -> str:
    return f"an {phrase}" if phrase[0] in "aeiou" else f"a {phrase}"


def _plural(word: str) -> str:
    return PLURALS.get(word, f"{word}s")


def phrase(thing: Thing, rng: random.Random, plural: bool = False) -> str:
    """Adjectives and noun, without an article: "small red striped circle"."""
    words = [rng.choice(COLOUR_WORDS.get(thing.colour, (thing.colour,)))]
    if thing.texture != "solid":
        words.insert(rng.choice((0, 1)), rng.choice(TEXTURE_WORDS[thing.texture]))
    if thing.says_size:
        words.insert(0, rng.choice(SIZE_WORDS[thing.size]))
    if thing.shape in LETTERS:
        words.append(f"{'letters' if plural else 'letter'} {thing.shape}")
    else:
        noun = thing.shape if rng.random() < 0.75 else rng.choice(SHAPE_WORDS.get(thing.shape, (thing.shape,)))
        words.append(_plural(noun) if plural else noun)
    return " ".join(words)


def place_words(place: str, rng: random.Random) -> str:
    if place == "center":
        return rng.choice(CENTER_WORDS)
    if " " not in place:
        return rng.choice(EDGE_WORDS[place])
    row, column = place.split()
    if rng.random() < 0.3:
        row = UPPER[row]
    return rng.choice((f"in the {row} {column} corner", f"at the {row} {column}", f"in the {row} {column}"))


def background_words(scene: Scene, rng: random.Random) -> str:
    top, bottom = scene.background
    if top != bottom:
        return rng.choice((f"on a background that fades from {top} to {bottom}", f"on a {top} to {bottom} gradient"))
    return rng.choice((f"on a {top} background", f"on {top}", f"against a {top} background"))


def _tags(scene: Scene, rng: random.Random) -> str:
    """The keyword style: "red circle, top left, white background"."""
    if scene.kind == "many":
        parts = [f"{rng.choice(NUMBER_WORDS[len(scene.things)])} {phrase(scene.things[0], rng, plural=True)}"]
    else:
        parts = [phrase(t, rng) for t in scene.things]
    if scene.place:
        parts.append(scene.place)
    if scene.says_background:
        top, bottom = scene.background
        parts.append(f"{top} background" if top == bottom else f"{top} to {bottom} gradient")
    return ", ".join(parts)


def _sentence(scene: Scene, rng: random.Random) -> str:
    if scene.kind == "many":
        body = f"{rng.choice(NUMBER_WORDS[len(scene.things)])} {phrase(scene.things[0], rng, plural=True)}"
    else:
        names = [_article(phrase(t, rng)) for t in scene.things]
        if scene.relation:
            body = f"{names[0]} {rng.choice(RELATION_WORDS[scene.relation])} {names[1]}"
        else:
            body = " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
    if scene.place:
        body = f"{body} {place_words(scene.place, rng)}"
    if scene.says_background:
        body = f"{body} {background_words(scene, rng)}"
    if rng.random() < 0.3:
        body = f"{rng.choice(OPENINGS)} {body}"
    return body


def caption(scene: Scene, rng: random.Random) -> str:
    """One wording of the scene; objects, place and relation are always said."""
    text = _tags(scene, rng) if scene.relation is None and rng.random() < 0.15 else _sentence(scene, rng)
    if rng.random() < 0.4:
        text = text[0].upper() + text[1:]
    return text + ("." if rng.random() < 0.15 else "")
