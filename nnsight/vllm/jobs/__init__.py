"""Programs of remote clients, run as requests of a vLLM engine."""
