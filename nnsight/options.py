"""Options that a program, the environment or a file can choose: the mechanism behind :mod:`nnsight.config`.

An :class:`Option` is a descriptor on a :class:`Section`. Reading it looks the value up; assigning to it checks type and name. The
file is read when a value is looked up for the first time, and :meth:`OptionFile.write` replaces it as a whole.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")

_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


class ConfigWarning(UserWarning):
    """Part of the user's file, or an environment variable, cannot be used as an option."""


class Option(Generic[T]):
    """One option: an attribute of its section that is looked up anew at each access.

    Args:
        default: The value if nobody chose one; ``None`` in a union of ``kind`` with ``None``.
        kind: The type of values.
        variable: The environment variable; ``NNSIGHT_<section>_<name>`` by default.
        secret: Whether values must not be shown.
        obsolete: Why the option has no effect any more; shown to those who choose it.
    """

    def __init__(
        self, default: T, kind: type, *, variable: str | None = None, secret: bool = False, obsolete: str | None = None
    ) -> None:
        self.default = default
        self.kind = kind
        self.secret = secret
        self.obsolete = obsolete
        self.name = ""
        self._variable = variable

    def __set_name__(self, owner: type[Section], name: str) -> None:
        self.name = name
        self.path = f"{owner.title}.{name}"
        self.variable = self._variable or f"NNSIGHT_{owner.title}_{name}"

    @overload
    def __get__(self, section: None, owner: type[Section]) -> Option[T]: ...
    @overload
    def __get__(self, section: Section, owner: type[Section]) -> T: ...
    def __get__(self, section: Section | None, owner: type[Section]) -> Option[T] | T:
        return self if section is None else section._look_up(self)[0]

    def __set__(self, section: Section, value: T) -> None:
        wrong = self.wrong(value)
        if wrong:
            raise TypeError(f"CONFIG.{self.path} {wrong}.")
        if self.obsolete is not None:
            warnings.warn(f"CONFIG.{self.path} has no effect: {self.obsolete}.", DeprecationWarning, stacklevel=3)
            return
        section._assigned[self.name] = value

    def __delete__(self, section: Section) -> None:
        section._assigned.pop(self.name, None)

    def wrong(self, value: Any) -> str:
        """Return what is wrong with ``value``, or an empty string."""
        if isinstance(value, self.kind) or (value is None and self.default is None):
            return ""
        optional = " or None" if self.default is None else ""
        shown = "" if self.secret else f" {value!r}"
        return f"is of type {self.kind.__name__}{optional}, not {type(value).__name__}{shown}"

    def parse(self, text: str) -> Any:
        """Return the value that the text of an environment variable stands for.

        Raises:
            ValueError: If it stands for none.
        """
        if self.kind is not bool:
            return text
        if text.lower() not in (*_TRUE, *_FALSE):
            raise ValueError(f"is {text!r}, which is neither of {', '.join(_TRUE)} nor of {', '.join(_FALSE)}")
        return text.lower() in _TRUE


class Section:
    """Options of one subject; a subclass has them as attributes.

    Args:
        file: The user's file.

    Attributes:
        title: Its name in ``CONFIG`` and in the file.
    """

    title = ""
    __slots__ = ("_assigned", "_file")

    def __init__(self, file: OptionFile) -> None:
        object.__setattr__(self, "_assigned", {})
        object.__setattr__(self, "_file", file)

    _assigned: dict[str, Any]
    _file: OptionFile

    def _look_up(self, option: Option[Any]) -> tuple[Any, str]:
        """Return the value of an option, and where it comes from."""
        if option.name in self._assigned:
            return self._assigned[option.name], "this program"
        text = os.environ.get(option.variable)
        if text and option.obsolete is None:
            try:
                return option.parse(text), f"environment variable {option.variable}"
            except ValueError as error:
                _warn(f"The environment variable {option.variable} {error}; it is not used.")
        values = self._file.values
        if option.path in values:
            return values[option.path], "file"
        return option.default, "default"

    @classmethod
    def options(cls) -> dict[str, Option[Any]]:
        """Return the options by name."""
        return {name: option for name, option in vars(cls).items() if isinstance(option, Option)}

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.options():
            raise AttributeError(self._unknown(name))
        object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(self._unknown(name))

    def _unknown(self, name: str) -> str:
        return f"CONFIG.{self.title} has no option {name!r}. {near(name, self.options())}"

    def __repr__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        for option in self.options().values():
            value, origin = self._look_up(option)
            shown = "<hidden>" if option.secret and value is not None else repr(value)
            yield f"CONFIG.{option.path} = {shown}  # {origin}"


class OptionFile:
    """The user's file.

    Args:
        sections: The sections it may have, by title.

    Attributes:
        sections: As given.
        options: All their options by path.
    """

    def __init__(self, sections: Mapping[str, type[Section]]) -> None:
        self.sections = sections
        self.options = {option.path: option for kind in sections.values() for option in kind.options().values()}
        self._lock = threading.Lock()
        self._values: dict[str, Any] | None = None

    @property
    def path(self) -> str:
        """Where the file is, whether or not it exists."""
        chosen = os.environ.get("NNSIGHT_CONFIG")
        if chosen:
            return os.path.abspath(os.path.expanduser(chosen))
        base = os.environ.get("XDG_CONFIG_HOME", "")
        if not os.path.isabs(base):  # the standard says to ignore it then
            base = os.path.expanduser("~/.config")
        return os.path.join(base, "nnsight", "config.json")

    @property
    def values(self) -> Mapping[str, Any]:
        """The usable options in the file by path, such as ``APP.DEBUG``; read from disk the first time."""
        if self._values is not None:
            return self._values
        with self._lock:
            if self._values is not None:
                return self._values
            problems = list(self._unknown_variables())
            try:
                content = _read(self.path)
            except (OSError, ValueError) as error:
                content = {}
                problems.append(f"The options in {self.path} are not used: {error}")
            self._values, wrong = self._usable(content)
            problems += [f"{self.path}: {problem}; it is not used." for problem in wrong]
        for problem in problems:
            _warn(problem)
        return self._values

    def write(self, values: Mapping[str, Any]) -> None:
        """Put ``values``, by option path, into the file. Defaults are left out, and so is the file if it would be empty.

        Raises:
            ValueError: If the file exists and is not what :meth:`write` writes; it is not touched then.
            OSError: If the file cannot be written.
        """
        import json
        import tempfile

        path = os.path.realpath(self.path)
        with self._lock:
            try:
                content = _read(path)
            except ValueError as error:
                raise ValueError(f"Nothing was saved, so as not to lose what is in {path}: {error}") from None
            for option_path, value in values.items():
                section, name = option_path.split(".")
                content.setdefault(section, {})[name] = value
            for option_path, option in self.options.items():
                section, name = option_path.split(".")
                if name in content.get(section, {}) and content[section][name] == option.default:
                    del content[section][name]
            content = {section: options for section, options in content.items() if options}
            if content or os.path.exists(path):
                folder = os.path.dirname(path)
                os.makedirs(folder, mode=0o700, exist_ok=True)
                # Readable by the user alone, for it may hold a key; and never there by halves.
                descriptor, temporary = tempfile.mkstemp(dir=folder, prefix=".config-")
                try:
                    with open(descriptor, "w", encoding="utf-8") as file:
                        json.dump(content, file, indent=2)
                        file.write("\n")
                    os.replace(temporary, path)
                except BaseException:
                    os.unlink(temporary)
                    raise
            self._values = self._usable(content)[0]

    def _usable(self, content: Mapping[str, Mapping[str, Any]]) -> tuple[dict[str, Any], list[str]]:
        """Return the options of a file by path, and what is wrong with the others."""
        values: dict[str, Any] = {}
        problems: list[str] = []
        for section, options in content.items():
            if section not in self.sections:
                problems.append(f"there is no section {section!r}. {near(section, self.sections)}".rstrip("."))
                continue
            for name, value in options.items():
                option = self.options.get(f"{section}.{name}")
                if option is None:
                    hint = near(name, self.sections[section].options())
                    problems.append(f"there is no option {section}.{name}. {hint}".rstrip("."))
                elif option.obsolete is not None:
                    problems.append(f"{option.path} has no effect: {option.obsolete}")
                elif option.wrong(value):
                    problems.append(f"{option.path} {option.wrong(value)}")
                else:
                    values[option.path] = value
        return values, problems

    def _unknown_variables(self) -> Iterator[str]:
        """Describe environment variables that look like options and are none."""
        known = {option.variable: option for option in self.options.values()}
        guessed = {f"NNSIGHT_{path.replace('.', '_')}": option.variable for path, option in self.options.items()}
        for variable in os.environ:
            if variable.startswith(tuple(f"NNSIGHT_{section}_" for section in self.sections)):
                if variable not in known:
                    hint = f"Did you mean {guessed[variable]}?" if variable in guessed else near(variable, known)
                    yield f"The environment variable {variable} is no option. {hint}"
                elif known[variable].obsolete is not None:
                    yield f"The environment variable {variable} has no effect: {known[variable].obsolete}."


def _read(path: str) -> dict[str, dict[str, Any]]:
    """Return the content of a file: options by name, by section. A file that does not exist is empty."""
    if not os.path.exists(path):
        return {}
    if not os.path.isfile(path):
        raise ValueError("it is not a regular file")
    import json

    with open(path, encoding="utf-8") as file:
        text = file.read()
    try:
        content = json.loads(text) if text.strip() else {}
    except ValueError as error:
        raise ValueError(f"it is not valid JSON ({error}). Correct or remove the file.") from None
    if not isinstance(content, dict) or not all(isinstance(options, dict) for options in content.values()):
        raise ValueError('it must hold an object for each section, as in {"APP": {"DEBUG": true}}. Correct the file.')
    return content


def near(name: str, known: Iterable[str]) -> str:
    """Return a hint for a name that is not among ``known``."""
    import difflib

    names = sorted(known)
    matches = difflib.get_close_matches(name.upper(), names, n=1)
    return f"Did you mean {matches[0]}?" if matches else f"There are {', '.join(names)}."


def _warn(message: str) -> None:
    warnings.warn(message, ConfigWarning, stacklevel=2)
