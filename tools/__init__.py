"""What is done once, by hand, and does not ship with the package."""
