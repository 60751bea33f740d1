"""Steering in the compiled graph of an engine: tables of parameters, users' functions, and programs."""
