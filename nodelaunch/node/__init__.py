"""All that runs on a node or in a rank; it imports nothing of the launcher's other side."""

# Where the ranks of a node hand over what they print, in the job's folder.
RANKS = "ranks.sock"
