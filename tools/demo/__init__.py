"""How the demo model was made and measured: `python -m tools.demo.train` in the root of the repository."""
