"""The instructor's side of a class: a container, a URL and a token for each team, behind one TLS front.

Compose, JupyterHub and Kubernetes do the work; this package reads ``teams.csv``, refuses what would go wrong, writes
their files and calls them. It needs nothing but Python and an engine, Docker or Podman, with Compose.
"""
