"""Tests: a folder for each folder of the package, and ``contract`` for what the documents promise.

They run without the configuration of whoever runs them, which the package reads when it is imported.
"""

import os
import tempfile
from pathlib import Path

#: The folder of the project.
ROOT = Path(__file__).resolve().parent.parent

os.environ["NNSIGHT_CONFIG"] = str(Path(tempfile.gettempdir(), "no-nnsight-configuration.yaml"))
