"""What the demo model shows (`python -m tools.demo`), and how it was made and measured (`python -m tools.demo.train`)."""
