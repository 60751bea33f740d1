"""Options of the library.

``CONFIG.APP.DEBUG`` is looked up each time it is read, so a change takes effect at once. The first of these that exists is used: the value
that this program has assigned (``del CONFIG.APP.DEBUG`` removes it), the environment variable (``NNSIGHT_APP_DEBUG=1``), the user's file,
the default. ``print(CONFIG)`` shows every value and its origin.

The file is ``$NNSIGHT_CONFIG``, else ``nnsight/config.json`` in ``$XDG_CONFIG_HOME`` or ``~/.config``. It is read when the first option is
looked up, and has an object for each section: ``{"APP": {"DEBUG": true}}``. It is JSON because the standard library reads and writes that.
Mistakes in the file or in an environment variable are warnings; mistakes of a program are errors.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from .options import ConfigWarning, Option, OptionFile, Section

__all__ = ["CONFIG", "ApiConfig", "AppConfig", "Config", "ConfigWarning"]


class AppConfig(Section):
    """Switches of the local library.

    Attributes:
        DEBUG: Show this package's own frames in tracebacks.
        CROSS_INVOKER: Let invokes see each other's variables. When off, each works on its own copy of the variables
            around it.
        PYMOUNT: Offer ``.save()`` as a method of built-in containers and numbers in helper functions outside of blocks. When
            off, use :func:`nnsight.save` there; inside a block, and on tensors, the method always works. The methods are
            attached once, before the first trace of a process; switch the option off before that.
        REMOTE_LOGGING: Print the progress of remote jobs.
        PROGRESS: Show what is being captured or lowered for a compiled trace, after two seconds.
        TRACE_CACHING: No effect; every block is compiled once, always.
    """

    title = "APP"

    DEBUG = Option(False)
    CROSS_INVOKER = Option(True)
    PYMOUNT = Option(True)
    REMOTE_LOGGING = Option(True)
    PROGRESS = Option(True)
    TRACE_CACHING = Option(True)


class ApiConfig(Section):
    """Where remote jobs go, and on whose behalf.

    Attributes:
        HOST: URL of the service; environment variable ``NDIF_HOST``.
        KEY: The user's key, a secret; environment variable ``NDIF_API_KEY``. ``APIKEY`` is another name for it.
        CUTS: How many jobs a remote trace or session may send for values that its block needs in Python; with 0, such a
            block is refused.
    """

    title = "API"

    HOST = Option("https://api.ndif.us", variable="NDIF_HOST")
    KEY: Option[str | None] = Option(None, variable="NDIF_API_KEY", secret=True)
    CUTS = Option(16)
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

    def save(self) -> None:
        """Keep what this program has assigned in the user's file, for later programs; its other content stays.

        Raises:
            ValueError: If the file that is there cannot be understood.
            OSError: If the file cannot be written.
        """
        sections: tuple[Section, ...] = (self.APP, self.API)
        self._file.write(
            {f"{section.title}.{name}": value for section in sections for name, value in section._assigned.items()}
        )

    def set_default_api_key(self, key: str) -> None:
        """Use ``key`` for remote jobs, now and, through the user's file, in later programs.

        Other options that this program has assigned are not kept by this.

        Raises:
            TypeError: If the key is no string.
            ValueError: If it is empty or has blanks in it; otherwise as :meth:`save`.
        """
        if not isinstance(key, str):
            raise TypeError(f"An API key is a string, not {type(key).__name__}. `CONFIG.API.KEY = None` uses none.")
        if key.split() != [key]:
            raise ValueError("An API key is one word without blanks; this one is empty or has some.")
        self.API.KEY = key
        self._file.write({"API.KEY": key})

    def __reduce__(self) -> str:
        """Copy and pickle as what it is: the options of the process."""
        return "CONFIG"

    def __repr__(self) -> str:
        path = self._file.path
        return f"# file: {path}{'' if os.path.exists(path) else ' (does not exist)'}\n{self.APP!r}\n{self.API!r}"


CONFIG = Config()
