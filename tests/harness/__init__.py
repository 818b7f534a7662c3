"""Shared test helpers: hosts made of namespaces, a Slurm, a browser, containers, and checks of a job's leftovers."""
