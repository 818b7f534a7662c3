"""The programs that run on a node or in a rank; they import nothing of the launcher's other side."""
