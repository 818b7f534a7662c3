"""One figure style for all labs.

Every drawing function but ``image_grid`` takes ``ax`` (a new figure if None). Each returns the Axes, so that a notebook
can add a title or a dashed line. Set-ups have the same colour in all labs.
"""

from lab_utils.plots.batches import crossover, group, speed_up, throughput
from lab_utils.plots.figures import curves, image_grid, step_times
from lab_utils.plots.nodes import scaling, timeline, utilisation
from lab_utils.plots.style import COLOURS, mark_noise, use_style

__all__ = [
    "COLOURS",
    "crossover",
    "curves",
    "group",
    "image_grid",
    "mark_noise",
    "scaling",
    "speed_up",
    "step_times",
    "throughput",
    "timeline",
    "use_style",
    "utilisation",
]
