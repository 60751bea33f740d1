"""A demonstration of the demo model (`python -m tools.demo`), and its training and evaluation (`python -m tools.demo.train`)."""
