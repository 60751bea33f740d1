"""Modules and operations as locations: their paths, the interception of their calls, and the properties that read their values."""
