"""Programs of remote clients, as requests of an engine."""
