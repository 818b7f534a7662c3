"""Why a job was ended before it had ended by itself."""

from enum import StrEnum


class StopReason(StrEnum):
    """The first four are a supervisor's: its limit, no heartbeat, a launcher that let go, a signal."""

    LIMIT = "limit"
    SILENCE = "silence"
    RELEASE = "release"
    SIGNAL = "signal"
    JOIN = "join"
    STOPPED = "stopped"
    INTERRUPTED = "interrupted"
