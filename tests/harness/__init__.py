"""What the tests share: hosts out of namespaces, a Slurm, a browser, containers, and looks at what a job leaves."""
