"""Options that a program, the environment or a file can set: the mechanism behind :mod:`nnsight.config`.

An :class:`Option` is a descriptor on a :class:`Section`. Reading it looks the value up; assigning to it checks name and type. The
file is read when a value is first looked up, and :meth:`OptionFile.write` replaces it as a whole.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeAlias, TypeVar

T = TypeVar("T")
Source: TypeAlias = "Callable[[], tuple[T, str] | None]"

_SWITCH = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(("0", "false", "no", "off"), False)


class ConfigWarning(UserWarning):
    """An entry of the user's file, or an environment variable, is not a valid option and is ignored."""


class Option(Generic[T]):
    """One option: an attribute of its section whose value is looked up at each access.

    Args:
        default: The value if no source has one. All values have its type; ``None`` stands for a string that is not set.
        variable: The environment variable; ``NNSIGHT_<section>_<name>`` by default.
        secret: Whether values are hidden when options are printed.
        alias: A second name. The file is written with this name.
        before_file: A further source between environment variable and file: returns the value and its source, or ``None``.
        after_file: Likewise, a source between file and default.
    """

    def __init__(
        self,
        default: T,
        *,
        variable: str | None = None,
        secret: bool = False,
        alias: str | None = None,
        before_file: Source[T] = lambda: None,
        after_file: Source[T] = lambda: None,
    ) -> None:
        self.default = default
        self.kind = str if default is None else type(default)
        self.secret, self.alias = secret, alias
        self.before_file, self.after_file = before_file, after_file
        self._variable = variable

    def __set_name__(self, owner: type[Section], name: str) -> None:
        self.name = name
        self.path = f"{owner.title}.{name}"
        self.variable = self._variable or f"NNSIGHT_{owner.title}_{name}"

    def __get__(self, section: Section | None, owner: type[Section]) -> Any:
        return self if section is None else section._look_up(self)[0]

    def __set__(self, section: Section, value: T) -> None:
        if not self.accepts(value):
            raise TypeError(f"CONFIG.{self.path} is of type {self.kind.__name__}, not {type(value).__name__}.")
        section._assigned[self.name] = value

    def __delete__(self, section: Section) -> None:
        section._assigned.pop(self.name, None)

    def read(self, text: str) -> Any:
        """Return the value that ``text``, an environment variable, stands for; ``None`` if it is not valid."""
        if self.kind is bool:
            return _SWITCH.get(text.lower())
        if self.kind is int:
            return int(text) if text.isdecimal() else None
        return text

    def accepts(self, value: Any) -> bool:
        """Whether ``value`` has the type of the option."""
        is_typed = isinstance(value, self.kind) and isinstance(value, bool) == (self.kind is bool)  # a bool is an int in Python
        return is_typed or (value is None and self.default is None)


class Section:
    """A group of options, which are attributes of a subclass."""

    title = ""  # name of the section in `CONFIG` and in the file
    _assigned: dict[str, Any]
    _file: OptionFile

    def __init__(self, file: OptionFile) -> None:
        vars(self).update(_assigned={}, _file=file)

    def _look_up(self, option: Option[Any]) -> tuple[Any, str]:
        """Return the value of an option, and its source in words."""
        if option.name in self._assigned:
            return self._assigned[option.name], "this program"
        text = os.environ.get(option.variable)
        if text:
            value = option.read(text)
            if value is not None:
                return value, f"environment variable {option.variable}"
            kinds = ", ".join(_SWITCH) if option.kind is bool else "the natural numbers"
            _warn(f"The environment variable {option.variable} is {text!r}, not one of {kinds}; it is not used.")
        values = self._file.values
        in_file = (values[option.path], "file") if option.path in values else None
        return option.before_file() or in_file or option.after_file() or (option.default, "default")

    @classmethod
    def options(cls) -> dict[str, Option[Any]]:
        """Return the options of the section by name."""
        return {name: option for name, option in vars(cls).items() if isinstance(option, Option)}

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.options() and not isinstance(getattr(type(self), name, None), property):
            raise AttributeError(f"CONFIG.{self.title} has no option {name!r}. There are {', '.join(self.options())}.")
        object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        lines = []
        for option in self.options().values():
            value, origin = self._look_up(option)
            shown = "<hidden>" if option.secret and value is not None else repr(value)
            lines.append(f"CONFIG.{option.path} = {shown}  # {origin}")
        return "\n".join(lines)


class OptionFile:
    """The user's file of options. ``options`` are all known options by path, such as ``APP.DEBUG``."""

    def __init__(self, options: Mapping[str, Option[Any]]) -> None:
        self._options = {
            path: option
            for option in options.values()
            for path in (option.path, f"{option.path.partition('.')[0]}.{option.alias or option.name}")
        }
        self._values: dict[str, Any] | None = None

    @property
    def path(self) -> str:
        """The path of the file, whether or not it exists."""
        chosen = os.environ.get("NNSIGHT_CONFIG")
        if chosen:
            return os.path.abspath(os.path.expanduser(chosen))
        base = os.environ.get("XDG_CONFIG_HOME", "")
        if not os.path.isabs(base):  # the XDG standard says to ignore a relative path
            base = os.path.expanduser("~/.config")
        path, older = (os.path.join(base, "nnsight", name) for name in ("config.yaml", "config.json"))
        return older if os.path.exists(older) and not os.path.exists(path) else path

    @property
    def values(self) -> Mapping[str, Any]:
        """The valid options in the file, by path. The file is read the first time, and again after :meth:`write`."""
        if self._values is None:
            try:
                content = _read(self.path)
            except (OSError, ValueError) as error:
                content = {}
                _warn(f"{self.path}: {error}; it is not used.")
            self._values = self._usable(content)
        return self._values

    def write(self, values: Mapping[str, Any]) -> None:
        """Write ``values``, by option path, to the file. Values that equal the default are removed from it.

        Raises:
            ValueError: If the file exists and does not have the form that :meth:`write` writes. It is left as it is.
            OSError: If the file cannot be written.
        """
        path = os.path.realpath(self.path)
        try:
            content = _read(path)
        except ValueError as error:
            raise ValueError(f"Nothing was saved, so as not to lose what is in {path}: {error}.") from None
        for option_path, value in values.items():
            title, name = option_path.split(".")
            option, options = self._options[option_path], content.setdefault(title, {})
            for known in {name, option.alias or name}:
                options.pop(known, None)
            if value != option.default:
                options[option.alias or name] = value
        kept = {title: options for title, options in content.items() if options}
        if path.endswith(".json"):
            import json

            text = json.dumps(kept, indent=2) + "\n"
        else:
            import yaml

            text = yaml.safe_dump(kept, sort_keys=False)
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        replace_file(path, text)
        self._values = None

    def _usable(self, content: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """Return the valid options in the content of a file, by path. Warns of entries that are not valid."""
        values: dict[str, Any] = {}
        given = {f"{title}.{name}": value for title, options in content.items() for name, value in options.items()}
        for path, value in given.items():
            option = self._options.get(path)
            if option is not None and option.accepts(value):
                values[option.path] = value
            else:
                what = f"there is no option {path}" if option is None else f"{path} is not of type {option.kind.__name__}"
                _warn(f"{self.path}: {what}; it is not used.")
        return values


def replace_file(path: str, text: str) -> None:
    """Replace a file atomically. Only its owner can read it, because it may contain a key."""
    import tempfile

    descriptor, temporary = tempfile.mkstemp(dir=os.path.dirname(path), prefix=".nnsight-")
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _read(path: str) -> dict[str, dict[str, Any]]:
    """Return the content of a file, ``{section: {option: value}}``; empty if the file does not exist."""
    if not os.path.exists(path):
        return {}
    with open(path, encoding="utf-8") as file:
        text = file.read()
    if path.endswith(".json"):
        import json

        content = json.loads(text or "{}")
    else:
        import yaml

        try:
            content = yaml.safe_load(text) or {}
        except yaml.YAMLError as error:
            raise ValueError(f"it is not YAML: {error}") from None
    if isinstance(content, dict):
        content = {title: {} if options is None else options for title, options in content.items()}
    if not isinstance(content, dict) or not all(isinstance(options, dict) for options in content.values()):
        raise ValueError('it must hold an object for each section, as in {"APP": {"DEBUG": true}}')
    return content


def _warn(message: str) -> None:
    warnings.warn(message, ConfigWarning, stacklevel=2)
