"""Options of the library.

An option such as ``CONFIG.APP.DEBUG`` is looked up each time it is read, so a change takes effect at once. The first source that has the
option is used: the value that this program has assigned (``del CONFIG.APP.DEBUG`` removes it), the environment variable
(``NNSIGHT_APP_DEBUG=1``), the user's file, the default. ``print(CONFIG)`` shows every value and its source.

The file is ``$NNSIGHT_CONFIG``, else ``nnsight/config.yaml`` (or ``config.json``, if only that exists) in ``$XDG_CONFIG_HOME`` or
``~/.config``. It is YAML, or JSON if its name ends in ``.json``, and has a mapping for each section, ``APP`` and ``API``. It is read when
the first option is looked up. Mistakes in the file or in an environment variable are warnings; mistakes of a program are errors.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Any

from .options import ConfigWarning, Option, OptionFile, Section

__all__ = ["CONFIG", "ApiConfig", "AppConfig", "Config", "ConfigWarning"]


def _asked_for_details() -> tuple[bool, str] | None:
    """Return ``True`` and its source if the program was started with full tracebacks on; ``None`` otherwise."""
    if os.environ.get("NNSIGHT_DEBUG"):
        return True, "environment variable NNSIGHT_DEBUG"
    flag = next((flag for flag in getattr(sys, "argv", [])[1:] if flag in ("-v", "--verbose")), None)
    return None if flag is None else (True, f"argument {flag} of this program")


def _colab_secret() -> tuple[str, str] | None:
    """Return the key from the secrets of a Colab notebook, and its source; None outside of Colab or without the secret. Asks Colab once."""
    if "google.colab" not in sys.modules and "COLAB_RELEASE_TAG" not in os.environ:
        return None
    if not _secrets:
        try:
            from google.colab import userdata

            _secrets.append(userdata.get("NDIF_API_KEY"))
        except Exception:  # no such secret, no access, no notebook: the key may come from another source
            _secrets.append(None)
    return (_secrets[0], "secret NDIF_API_KEY of this notebook") if _secrets[0] else None


_secrets: list[Any] = []


class AppConfig(Section):
    """Switches of the local library.

    Attributes:
        DEBUG: Show this package's own frames in tracebacks. Also on with any value of the environment variable ``NNSIGHT_DEBUG``,
            and with ``-v`` or ``--verbose`` among the arguments of the program.
        CROSS_INVOKER: Let invokes see each other's variables. When off, each works on its own copy of the variables
            around it.
        PYMOUNT: Offer ``.save()`` as a method of built-in containers and numbers in helper functions outside of blocks. When
            off, use :func:`nnsight.save` there; inside a block, and on tensors, the method always works. The methods are
            attached once, before the first trace of a process; to do without them, switch the option off before that.
        REMOTE_LOGGING: Print the progress of remote jobs.
        PROGRESS: Show the progress of a compiled trace whose captures or lowerings take more than two seconds.
        TRACE_CACHING: No effect; every block is always compiled once.
        DISABLE_CPP_BACKTRACE: No effect; it exists for scripts of other versions that assign it.
    """

    title = "APP"

    DEBUG = Option(False, before_file=_asked_for_details)
    CROSS_INVOKER = Option(True)
    PYMOUNT = Option(True)
    REMOTE_LOGGING = Option(True)
    PROGRESS = Option(True)
    TRACE_CACHING = Option(True)
    DISABLE_CPP_BACKTRACE = Option(True)


class ApiConfig(Section):
    """The service that runs remote jobs, and the user's key for it.

    Attributes:
        HOST: URL of the service; environment variable ``NDIF_HOST``.
        KEY: The user's key, a secret; environment variable ``NDIF_API_KEY``. ``APIKEY`` is an alias of this option, and its name in the
            file. In Colab, the notebook's secret ``NDIF_API_KEY`` is used if no other source has a key.
        CUTS: Most jobs that a remote trace or session may send for values that its block needs in Python; with 0, such a
            block is refused.
        COMPRESS: No effect; it exists for scripts of other versions that assign it.
    """

    title = "API"

    HOST = Option("https://api.ndif.us", variable="NDIF_HOST")
    KEY: Option[str | None] = Option(None, variable="NDIF_API_KEY", secret=True, alias="APIKEY", after_file=_colab_secret)
    CUTS = Option(16)
    COMPRESS = Option(True)
    APIKEY = property(lambda self: self.KEY, lambda self, key: setattr(self, "KEY", key))


@dataclass(frozen=True, eq=False, repr=False)
class Config:
    """All options, by section."""

    APP: AppConfig
    API: ApiConfig
    _file: OptionFile

    def __init__(self) -> None:
        options = {option.path: option for kind in (AppConfig, ApiConfig) for option in kind.options().values()}
        file = OptionFile(options)
        vars(self).update(APP=AppConfig(file), API=ApiConfig(file), _file=file)

    @classmethod
    def load(cls) -> Config:
        """Return new options without the values that this program has assigned: they come from environment and file."""
        return cls()

    def save(self) -> None:
        """Write the values that this program has assigned to the user's file, for later programs. The file keeps its other options.

        Raises:
            ValueError: If the file exists and cannot be parsed. It is left as it is.
            OSError: If the file cannot be written.
        """
        sections: tuple[Section, ...] = (self.APP, self.API)
        self._file.write(
            {f"{section.title}.{name}": value for section in sections for name, value in section._assigned.items()}
        )

    def set_default_api_key(self, key: str) -> None:
        """Use ``key`` for remote jobs, now and, through the user's file, in later programs.

        Other options that this program has assigned are not written to the file.

        Raises:
            TypeError: If the key is not a string.
            ValueError: If the key is empty or has blanks in it; otherwise as :meth:`save`.
        """
        if not isinstance(key, str):
            raise TypeError(f"An API key is a string, not {type(key).__name__}. `CONFIG.API.KEY = None` uses none.")
        if key.split() != [key]:
            raise ValueError("An API key is one word without blanks; this one is empty or has some.")
        self.API.KEY = key
        self._file.write({"API.KEY": key})

    def __reduce__(self) -> str:
        """Copy and unpickle as ``CONFIG`` itself, the one instance of the process."""
        return "CONFIG"

    def __repr__(self) -> str:
        path = self._file.path
        return f"# file: {path}{'' if os.path.exists(path) else ' (does not exist)'}\n{self.APP!r}\n{self.API!r}"


CONFIG = Config()
