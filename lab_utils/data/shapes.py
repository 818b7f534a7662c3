"""shapes10: ten classes of small pictures, drawn on the spot, for a machine on which no real data set lies.

Every picture has a generator of its own, seeded by (seed, split, index). So it is the same picture whoever draws it, in
whatever order and in however many processes. The arithmetic is in float64, because the last bit of a float32 sine
differs between CPUs, and a difference there would now and then show in a rounded pixel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

FINGERPRINT = "shapes10, seed 0"
COUNTS = {"train": 10_000, "valid": 2_000, "test": 2_000}
SIZE = 32

Plane = np.ndarray
"""float64 (32, 32): one value a pixel."""

_USUAL, _STRAY = 0.75, 45  # how often a form has its usual colour, and how far it strays from it

# Centres of the pixels, in pixels from the middle of the picture.
_Y, _X = np.mgrid[0:SIZE, 0:SIZE] - (SIZE - 1) / 2


def _box(x: Plane, y: Plane, half_width: float, half_height: float) -> Plane:
    return np.maximum(np.abs(x) - half_width, np.abs(y) - half_height)


def _polygon(x: Plane, y: Plane, sides: int, inner: float) -> Plane:
    angles = np.arange(sides) * (2 * np.pi / sides) + np.pi / 2
    return np.maximum.reduce([x * np.cos(a) + y * np.sin(a) for a in angles]) - inner


def _star(x: Plane, y: Plane) -> Plane:
    sector = 2 * np.pi / 5
    radius, angle = np.hypot(x, y), np.arctan2(x, -y)
    # All ten half points of the star fold onto one, whose edge runs from the tip (1, 0) to the notch.
    folded = np.abs((angle + sector / 2) % sector - sector / 2)
    px, py = radius * np.cos(folded), radius * np.sin(folded)
    notch_x, notch_y = 0.42 * np.cos(sector / 2), 0.42 * np.sin(sector / 2)
    normal_x, normal_y = notch_y, 1 - notch_x
    return ((px - 1) * normal_x + py * normal_y) / np.hypot(normal_x, normal_y)


def _arrow(x: Plane, y: Plane) -> Plane:
    head = np.maximum.reduce([(np.abs(x) - y - 1) * 0.7071, y + 0.05])
    return np.minimum(head, _box(x, y - 0.4, 0.26, 0.6))


# The usual colour of each form, and the distance from its edge, in units of its radius: negative inside; y points down.
_FORMS: dict[str, tuple[tuple[int, int, int], Callable[[Plane, Plane], Plane]]] = {
    "arrow": ((60, 190, 75), _arrow),
    "crescent": ((245, 225, 100), lambda x, y: np.maximum(np.hypot(x, y) - 1, 0.82 - np.hypot(x - 0.52, y))),
    "cross": ((240, 240, 240), lambda x, y: np.minimum(_box(x, y, 0.3, 1), _box(x, y, 1, 0.3))),
    "disc": ((245, 130, 40), lambda x, y: np.hypot(x, y) - 0.95),
    "heart": ((225, 35, 60), lambda x, y: np.hypot(x, 1.1 * y + 0.65 * np.sqrt(np.abs(x)) - 0.1) - 0.95),
    "hexagon": ((130, 90, 50), lambda x, y: _polygon(x, y, 6, 0.87)),
    "ring": ((60, 200, 220), lambda x, y: np.abs(np.hypot(x, y) - 0.74) - 0.24),
    "square": ((50, 80, 210), lambda x, y: _box(x, y, 0.8, 0.8)),
    "star": ((230, 190, 30), _star),
    "triangle": ((150, 60, 190), lambda x, y: _polygon(x, y + 0.15, 3, 0.58)),
}
CLASS_NAMES = tuple(_FORMS)


def _choose_colours(rng: np.random.Generator, label: int) -> np.ndarray:
    """Returns five colours, float64 (5, 3, 1, 1) in 0..255: background, form, the background's other end, two others.

    Colours go with classes as they do in the world: most hearts are red and most moons yellow, but not all, and other
    things are too. It is what a small net learns first; to go on climbing it has to learn the forms.
    """
    colours = rng.uniform((60, 60, 60), (190, 190, 190), (5, 3))
    if rng.uniform() < _USUAL:
        colours[1] = np.array(_FORMS[CLASS_NAMES[label]][0]) + rng.normal(0, _STRAY, 3)
    else:
        colours[1] = rng.uniform(0, 255, 3)
    away = colours[1] - colours[0]
    # A form that is nearly the colour of its background could not be seen: the background moves away from it.
    nearness = 1 - min(1.0, float(np.abs(away).sum()) / 180)
    colours[0] -= np.where(away < 0, -90, 90) * nearness
    return colours[:, :, None, None]


def _draw_background(rng: np.random.Generator, near: np.ndarray, far: np.ndarray) -> np.ndarray:
    """Returns float64 (3, 32, 32): a slope from one colour towards another, with waves on it."""
    direction, wave, turn, phase = rng.uniform(0, 2 * np.pi, 4)
    period, height = rng.uniform(3, 14), rng.uniform(3, 25)
    slope = (_X * np.cos(direction) + _Y * np.sin(direction)) / (SIZE * 1.5) + 0.5
    ripple = np.sin((_X * np.cos(wave) + _Y * np.sin(wave)) * (2 * np.pi / period) + phase)
    if turn > np.pi:  # half of the textures are woven, the other half striped
        ripple = ripple * np.sin((_Y * np.cos(wave) - _X * np.sin(wave)) * (2 * np.pi / period))
    return near + (far - near) * (0.45 * slope) + height * ripple


def _draw_distractor(picture: np.ndarray, rng: np.random.Generator, colour: np.ndarray) -> np.ndarray:
    """Returns the picture with a bar or a blob laid over it, which belongs to no class."""
    x0, y0 = rng.uniform(-15, 15, 2)
    angle, kind, size = rng.uniform(0, 2 * np.pi), rng.uniform(), rng.uniform(1.2, 3.2)
    x, y = _X - x0, _Y - y0
    if kind < 0.5:
        distance = np.abs(x * np.cos(angle) + y * np.sin(angle)) - size / 3
    else:
        distance = np.hypot(x * (1 + kind), y) - size
    cover = np.clip(0.5 - distance, 0, 0.85)
    return picture + (colour - picture) * cover


def draw_image(split: str, index: int, *, seed: int = 0) -> tuple[np.ndarray, int]:
    """Draws one picture.

    Args:
        split: ``train``, ``valid`` or ``test``.
        index: The picture's place in its split; the class is ``index % 10``, so that the classes are balanced.
        seed: Another seed gives another data set.

    Returns:
        The image, uint8 (3, 32, 32), and its label.
    """
    rng = np.random.default_rng([seed, list(COUNTS).index(split), index])
    label = index % len(CLASS_NAMES)
    ground, paint, slope, *clutter = _choose_colours(rng, label)
    picture = _draw_background(rng, ground, slope)
    hidden, laid_over = rng.integers(0, 3, 2)
    for _ in range(hidden):
        picture = _draw_distractor(picture, rng, clutter[0])

    radius, angle = rng.uniform(7.5, 14), rng.uniform(-0.6, 0.6)
    (x0, y0), stretch = rng.uniform(-1, 1, 2) * (15.5 - radius), rng.uniform(0.8, 1.25)
    cos, sin = np.cos(angle) / radius, np.sin(angle) / radius
    x, y = _X - x0, _Y - y0
    distance = _FORMS[CLASS_NAMES[label]][1]((x * cos + y * sin) * stretch, y * cos - x * sin)
    # The edge is as soft as in a photograph: one pixel wide, times how far the form is from opaque.
    cover = np.clip(0.5 - distance * radius, 0, 1) * rng.uniform(0.7, 1)
    shade = paint * (1 + rng.uniform(-0.35, 0.35) * y / radius)
    picture = picture + (shade - picture) * cover

    for _ in range(laid_over):
        picture = _draw_distractor(picture, rng, clutter[1])
    picture = picture + rng.normal(0, rng.uniform(2, 18), picture.shape)
    return np.clip(np.rint(picture), 0, 255).astype(np.uint8), label


def draw_images(split: str, indices: Iterable[int], *, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Draws several pictures: images uint8 (N, 3, 32, 32) and labels int64 (N,), in the order of ``indices``."""
    drawn = [draw_image(split, index, seed=seed) for index in indices]
    return np.stack([image for image, _ in drawn]), np.array([label for _, label in drawn], dtype=np.int64)
