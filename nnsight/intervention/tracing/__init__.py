"""Import paths of the tracing layer."""
