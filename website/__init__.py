"""The course as a web site: ``make site`` writes it from the README, the committed notebooks and the docstrings."""
