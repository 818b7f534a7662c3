"""The honest timer and the records that later labs read.

``measure`` and ``interleave`` time a step (synchronised, warm-up dropped, spread kept), ``find_speed_up`` compares two
set-ups and ``compare`` several, ``find_noise`` says when they are no finding, and ``Records`` keeps them under
``LAB_RUNS``; ``Timeline`` records the phases of every step of a run.
"""

from lab_utils.timing.comparison import SpeedUp, compare, find_speed_up
from lab_utils.timing.measure import Timing, find_noise, interleave, limit_rounds, measure, synchronize
from lab_utils.timing.memory import count_saved_bytes
from lab_utils.timing.others import find_others, read_usage
from lab_utils.timing.records import Records, UnreadableWarning
from lab_utils.timing.timeline import Timeline

__all__ = [
    "Records",
    "SpeedUp",
    "Timeline",
    "Timing",
    "UnreadableWarning",
    "compare",
    "count_saved_bytes",
    "find_noise",
    "find_others",
    "find_speed_up",
    "interleave",
    "limit_rounds",
    "measure",
    "read_usage",
    "synchronize",
]
