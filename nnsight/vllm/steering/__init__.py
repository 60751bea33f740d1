"""Steering in the compiled graph of an engine: vectors by name, tables of parameters, and functions of users."""
