"""All that runs on a node or in a rank; it imports nothing of the launcher's other side."""
