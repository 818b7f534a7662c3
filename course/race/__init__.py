"""The race: who trains a network to a given top-1 in the least time? A judge runs the script and takes the time.

``race.run_lap("scripts/race.py", ["--epochs", 4], name="me")`` runs one lap, ``race.run_laps(…)`` laps until there are
three. In a terminal, ``python -m course.race`` runs laps and writes the leaderboard.
"""

from course.race.runner import run_lap, run_laps, tell

__all__ = ["run_lap", "run_laps", "tell"]
