"""The honest timer and the records that later labs read.

``measure`` and ``interleave`` time a step (synchronised, warm-up dropped, spread kept), ``compare`` sets the results
side by side, ``find_noise`` says when they are no finding, and ``Records`` keeps them under ``LAB_RUNS``; ``Timeline``
records the phases of every step of a run.
"""

from lab_utils.timing.comparison import compare
from lab_utils.timing.measure import Timing, interleave, measure, synchronize
from lab_utils.timing.memory import count_saved_bytes
from lab_utils.timing.noise import find_noise, lie_apart
from lab_utils.timing.others import find_others, read_usage
from lab_utils.timing.records import Records, UnreadableWarning, list_skipped
from lab_utils.timing.timeline import Timeline

__all__ = [
    "Records",
    "Timeline",
    "Timing",
    "UnreadableWarning",
    "compare",
    "count_saved_bytes",
    "find_noise",
    "find_others",
    "interleave",
    "lie_apart",
    "list_skipped",
    "measure",
    "read_usage",
    "synchronize",
]
