"""Tests: a folder for each folder of the package, and ``contract`` for what the documents promise."""

from pathlib import Path

#: The folder of the project.
ROOT = Path(__file__).resolve().parent.parent
