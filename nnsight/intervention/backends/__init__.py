"""Import paths of backends."""
