"""CONFIG: values from the program, the environment, the user's file and the defaults; keeping them in the file."""

from __future__ import annotations

import copy
import json
import os
import pickle
import stat
import subprocess
import sys
import textwrap
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch

import nnsight
from nnsight import NNsight
from nnsight.config import Config, ConfigWarning

VARIABLES = ("NNSIGHT_CONFIG", "XDG_CONFIG_HOME", "NDIF_HOST", "NDIF_API_KEY")


@pytest.fixture(autouse=True)
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of the test's own, which does not exist, and no variables."""
    for variable in list(os.environ):
        if variable in VARIABLES or variable.startswith(("NNSIGHT_APP_", "NNSIGHT_API_")):
            monkeypatch.delenv(variable)
    monkeypatch.setattr(sys, "argv", ["program"])
    file = tmp_path / "home" / "config.json"
    monkeypatch.setenv("NNSIGHT_CONFIG", str(file))
    return file


def write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def run(code: str, **environment: str) -> str:
    """Run a program with the file and the variables of the test, warnings being errors; return what it prints."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# -- values ------------------------------------------------------------------------------------------------------------


def test_program_before_environment_before_file_before_default(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(path, {"API": {"HOST": "http://file"}})
    config = Config()
    assert config.API.HOST == "http://file"
    monkeypatch.setenv("NDIF_HOST", "http://environment")
    assert config.API.HOST == "http://environment"
    config.API.HOST = "http://program"
    assert config.API.HOST == "http://program"
    del config.API.HOST
    assert config.API.HOST == "http://environment"
    monkeypatch.delenv("NDIF_HOST")
    assert config.API.HOST == "http://file"
    del config.API.HOST  # nothing to take back


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", True), ("TRUE", True), ("yes", True), ("on", True), ("0", False), ("off", False), ("", True)],
)
def test_switches_in_the_environment(monkeypatch: pytest.MonkeyPatch, text: str, value: bool) -> None:
    monkeypatch.setenv("NNSIGHT_APP_CROSS_INVOKER", text)
    assert Config().APP.CROSS_INVOKER is value


def test_every_option_has_a_variable_and_a_place_in_the_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {
        "APP.DEBUG": "NNSIGHT_APP_DEBUG",
        "APP.CROSS_INVOKER": "NNSIGHT_APP_CROSS_INVOKER",
        "APP.PYMOUNT": "NNSIGHT_APP_PYMOUNT",
        "APP.REMOTE_LOGGING": "NNSIGHT_APP_REMOTE_LOGGING",
        "API.HOST": "NDIF_HOST",
        "API.KEY": "NDIF_API_KEY",
    }
    for option, variable in variables.items():
        section, name = option.split(".")
        default = getattr(getattr(Config(), section), name)
        value = (not default) if isinstance(default, bool) else "other"
        monkeypatch.setenv(variable, str(value))
        assert getattr(getattr(Config(), section), name) == value, option
        monkeypatch.delenv(variable)
        write(path, {section: {name: value}})
        assert getattr(getattr(Config(), section), name) == value, option
        path.unlink()


def test_an_option_takes_effect_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = NNsight(torch.nn.Linear(2, 2))

    def frames() -> int:
        with pytest.raises(KeyError) as raised:
            with model.trace(torch.ones(1, 2)):
                model.output  # noqa: B018
                raise KeyError
        return len(traceback.extract_tb(raised.value.__traceback__))

    short = frames()
    monkeypatch.setenv("NNSIGHT_APP_DEBUG", "1")
    assert frames() > short
    monkeypatch.setenv("NNSIGHT_APP_DEBUG", "0")
    assert frames() == short


def test_an_option_that_does_not_exist() -> None:
    config = Config()
    with pytest.raises(AttributeError, match=r"CONFIG\.APP has no option 'DEBUGG'. There are DEBUG, CROSS_INVOKER"):
        config.APP.DEBUGG = True
    with pytest.raises(AttributeError, match="cross_invoker"):
        config.APP.cross_invoker  # noqa: B018
    with pytest.raises(AttributeError, match="DEBUG"):
        config.DEBUG = True
    with pytest.raises(AttributeError, match="APP"):
        config.APP = None
    assert not hasattr(config, "nothing")
    assert not hasattr(config.APP, "nothing")


@pytest.mark.parametrize("value", [1, "true", None, [True]])
def test_an_assigned_value_of_another_type(value: Any) -> None:
    config = Config()
    with pytest.raises(TypeError, match=rf"CONFIG\.APP\.DEBUG is of type bool, not {type(value).__name__}"):
        config.APP.DEBUG = value
    assert config.APP.DEBUG is False
    with pytest.raises(TypeError, match=r"CONFIG\.API\.HOST is of type str, not NoneType"):
        config.API.HOST = None
    with pytest.raises(TypeError, match=r"CONFIG\.API\.CUTS is of type int, not bool"):
        config.API.CUTS = True
    config.API.KEY = None


def test_a_wrong_type_does_not_show_a_secret() -> None:
    with pytest.raises(TypeError, match=r"CONFIG\.API\.KEY is of type str, not bytes") as raised:
        Config().API.KEY = b"hidden-key"
    assert "hidden-key" not in str(raised.value)


def test_trace_caching_is_accepted() -> None:
    config = Config()
    config.APP.TRACE_CACHING = False
    assert config.APP.TRACE_CACHING is False


def test_repr_shows_values_and_origins_and_hides_the_key(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config()
    assert f"# file: {path} (does not exist)" in repr(config)
    assert "CONFIG.API.KEY = None  # default" in repr(config)
    config.APP.DEBUG = True
    monkeypatch.setenv("NDIF_API_KEY", "hidden-key")
    assert "CONFIG.APP.DEBUG = True  # this program" in repr(config)
    assert "CONFIG.API.KEY = <hidden>  # environment variable NDIF_API_KEY" in repr(config.API)
    assert "hidden-key" not in repr(config) + repr(config.API) + str(config)
    config.API.KEY = "hidden-key"
    assert "hidden-key" not in repr(config)


def test_options_are_those_of_the_process_when_copied() -> None:
    assert copy.deepcopy(nnsight.CONFIG) is nnsight.CONFIG
    assert pickle.loads(pickle.dumps(nnsight.CONFIG)) is nnsight.CONFIG


# -- what cannot be used -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{broken", "double quotes.*not used"),
        ("[1]", "must hold an object for each section"),
        ({"APP": True}, "must hold an object for each section"),
        ({"APP": {"DEBUGG": True}}, r"no option APP\.DEBUGG; it is not used"),
        ({"APPS": {"DEBUG": True}}, r"no option APPS\.DEBUG; it is not used"),
        ({"APP": {"DEBUG": "yes"}}, r"APP\.DEBUG is not of type bool; it is not used"),
        ({"API": {"KEY": 7}}, r"API\.KEY is not of type str; it is not used"),
        ({"API": {"CUTS": True}}, r"API\.CUTS is not of type int; it is not used"),
    ],
)
def test_a_file_that_is_wrong_is_reported_once_and_left_out(path: Path, content: Any, message: str) -> None:
    write(path, content)
    config = Config()
    with pytest.warns(ConfigWarning, match=message) as caught:
        assert config.APP.DEBUG is False
    assert len(caught) == 1
    assert str(path) in str(caught[0].message)
    assert config.API.KEY is None  # without a second warning


def test_the_good_part_of_a_file_counts(path: Path) -> None:
    write(path, {"APP": {"PYMOUNT": 3, "DEBUG": True}})
    with pytest.warns(ConfigWarning, match=r"APP\.PYMOUNT"):
        assert Config().APP.DEBUG is True


def test_an_empty_file_and_a_folder_in_place_of_the_file(path: Path) -> None:
    write(path, "")
    assert Config().APP.DEBUG is False
    path.unlink()
    path.mkdir()
    with pytest.warns(ConfigWarning, match="Is a directory"):
        assert Config().APP.DEBUG is False
    config = Config()
    config.APP.DEBUG = True
    with pytest.raises(OSError, match="Is a directory"):
        config.save()


# -- keeping ------------------------------------------------------------------------------------------------------------


def test_saved_options_are_those_of_the_next_program(path: Path) -> None:
    run("from nnsight import CONFIG; CONFIG.APP.DEBUG = True; CONFIG.APP.PYMOUNT = False; CONFIG.save()")
    assert json.loads(path.read_text()) == {"APP": {"DEBUG": True, "PYMOUNT": False}}
    show = "from nnsight import CONFIG; print(CONFIG.APP.DEBUG, CONFIG.APP.PYMOUNT, CONFIG.APP.CROSS_INVOKER)"
    assert run(show) == "True False True"
    assert run(show, NNSIGHT_APP_DEBUG="0", NNSIGHT_APP_CROSS_INVOKER="0") == "False False False"
    assert run(show, NNSIGHT_CONFIG=str(path) + ".other") == "False True True"


def test_defaults_are_not_written(path: Path) -> None:
    config = Config()
    config.APP.DEBUG = True
    config.save()
    config.APP.DEBUG = False
    config.APP.CROSS_INVOKER = True
    config.save()
    assert json.loads(path.read_text()) == {}


def test_values_of_the_environment_are_never_written(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NDIF_API_KEY", "hidden-key")
    monkeypatch.setenv("NNSIGHT_APP_DEBUG", "1")
    config = Config()
    assert config.API.KEY == "hidden-key"
    config.API.HOST = "http://here"
    config.save()
    assert json.loads(path.read_text()) == {"API": {"HOST": "http://here"}}


def test_set_default_api_key_keeps_the_key_and_nothing_else(path: Path) -> None:
    config = Config()
    config.APP.DEBUG = True
    config.set_default_api_key("my-key")
    assert config.API.KEY == "my-key"
    assert json.loads(path.read_text()) == {"API": {"APIKEY": "my-key"}}
    assert run("from nnsight import CONFIG; print(CONFIG.API.KEY)") == "my-key"
    assert run("from nnsight import CONFIG; print(CONFIG.API.KEY)", NDIF_API_KEY="other") == "other"
    for wrong in ("", "two words", "key\n"):
        with pytest.raises(ValueError, match="one word without blanks"):
            config.set_default_api_key(wrong)
    with pytest.raises(TypeError, match="not NoneType"):
        config.set_default_api_key(None)  # type: ignore[arg-type]
    assert config.API.KEY == "my-key"


def test_the_file_is_private_and_replaced_as_a_whole(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(path, {"APP": {"DEBUG": True}})
    path.chmod(0o644)
    config = Config()
    config.set_default_api_key("my-key")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    before = path.read_text()

    def fail(*_: Any) -> None:
        raise OSError("disk is full")

    monkeypatch.setattr(os, "replace", fail)
    config.APP.PYMOUNT = False
    with pytest.raises(OSError, match="disk is full"):
        config.save()
    assert path.read_text() == before
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_new_folder_is_private(path: Path) -> None:
    config = Config()
    config.APP.DEBUG = True
    config.save()
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_link_stays_a_link(path: Path) -> None:
    target = path.parent.parent / "dotfiles.json"
    write(target, {})
    path.parent.mkdir()
    path.symlink_to(target)
    config = Config()
    config.APP.DEBUG = True
    config.save()
    assert path.is_symlink()
    assert json.loads(target.read_text()) == {"APP": {"DEBUG": True}}


def test_saving_keeps_what_others_have_written(path: Path) -> None:
    write(path, {"APP": {"PYMOUNT": False}, "FUTURE": {"OPTION": 1}})
    config = Config()
    with pytest.warns(ConfigWarning, match="FUTURE"):
        assert config.APP.PYMOUNT is False
    write(path, {"API": {"KEY": "of-another-program"}, "FUTURE": {"OPTION": 1}})
    config.APP.DEBUG = True
    config.save()
    assert json.loads(path.read_text()) == {
        "APP": {"DEBUG": True},
        "API": {"KEY": "of-another-program"},
        "FUTURE": {"OPTION": 1},
    }
    with pytest.warns(ConfigWarning, match="FUTURE"):
        assert config.API.KEY == "of-another-program"


def test_a_file_that_cannot_be_understood_is_not_overwritten(path: Path) -> None:
    write(path, "{broken")
    config = Config()
    config.APP.DEBUG = True
    with pytest.raises(ValueError, match="Nothing was saved.*double quotes"):
        config.save()
    assert path.read_text() == "{broken"


def test_where_the_file_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NNSIGHT_CONFIG")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    write(tmp_path / "xdg" / "nnsight" / "config.json", {"APP": {"DEBUG": True}})
    assert Config().APP.DEBUG is True
    monkeypatch.setenv("XDG_CONFIG_HOME", "relative")
    assert Config().APP.DEBUG is False
    write(tmp_path / ".config" / "nnsight" / "config.json", {"APP": {"DEBUG": True}})
    assert Config().APP.DEBUG is True
    monkeypatch.delenv("XDG_CONFIG_HOME")
    assert Config().APP.DEBUG is True
    monkeypatch.setenv("NNSIGHT_CONFIG", "~/none.json")
    assert Config().APP.DEBUG is False
    assert Config()._file.path == str(tmp_path / "none.json")


def test_without_a_file_nothing_heavy_is_imported() -> None:
    code = """
    import sys
    from nnsight import CONFIG
    CONFIG.APP.DEBUG, CONFIG.API.KEY
    assert not {"yaml", "json", "tempfile", "torch"} & set(sys.modules)
    print("light")
    """
    assert run(code) == "light"




def test_a_program_or_a_variable_asks_for_all_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config()
    for argument in ("-v", "--verbose"):
        monkeypatch.setattr(sys, "argv", ["program", "input", argument])
        assert config.APP.DEBUG is True
        assert f"argument {argument} of this program" in repr(config.APP)
    monkeypatch.setenv("NNSIGHT_APP_DEBUG", "0")
    assert config.APP.DEBUG is False
    monkeypatch.delenv("NNSIGHT_APP_DEBUG")
    monkeypatch.setattr(sys, "argv", ["-v"])  # the name of the program is no argument
    assert config.APP.DEBUG is False
    monkeypatch.setenv("NNSIGHT_DEBUG", "anything")
    assert config.APP.DEBUG is True
    config.APP.DEBUG = False
    assert config.APP.DEBUG is False


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the file where no variable names the file."""
    monkeypatch.delenv("NNSIGHT_CONFIG")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path / "nnsight"


def test_a_yaml_file_as_other_versions_leave_it(home: Path) -> None:
    text = "API:\n  APIKEY: hidden-key\n  COMPRESS: true\n  HOST: https://other\nAPP:\n  DEBUG: true\n  DISABLE_CPP_BACKTRACE: true\n"
    write(home / "config.yaml", text)
    config = Config.load()
    assert (config.API.KEY, config.API.HOST, config.APP.DEBUG) == ("hidden-key", "https://other", True)
    config.API.HOST = "https://third"
    config.set_default_api_key("new-key")
    assert config.API.APIKEY == Config.load().API.KEY == "new-key"
    assert Config.load().API.HOST == "https://other"  # only the key was written
    config.save()
    assert Config.load().API.HOST == "https://third" and Config.load().APP.DEBUG is True
    assert "APIKEY: new-key" in (home / "config.yaml").read_text()
    assert [file.name for file in home.iterdir()] == ["config.yaml"]


def test_a_json_file_of_an_earlier_version_is_used_until_there_is_another(home: Path) -> None:
    write(home / "config.json", {"API": {"KEY": "hidden-key"}, "APP": {"DEBUG": True}})
    config = Config()
    assert config.API.KEY == "hidden-key"
    config.set_default_api_key("new-key")
    assert json.loads((home / "config.json").read_text()) == {"API": {"APIKEY": "new-key"}, "APP": {"DEBUG": True}}
    write(home / "config.yaml", "APP:\nAPI: {APIKEY: third}\n")
    assert (Config().API.KEY, Config().APP.DEBUG) == ("third", False)


@pytest.mark.parametrize("text", ["API: [1", "- 1", "API: 7"])
def test_yaml_that_is_wrong_is_reported_and_left_out(home: Path, text: str) -> None:
    write(home / "config.yaml", text)
    with pytest.warns(ConfigWarning, match="it is not YAML|must hold an object for each section"):
        assert Config().API.KEY is None


def test_options_without_effect_here_can_be_assigned() -> None:
    config = Config()
    assert (config.API.COMPRESS, config.APP.DISABLE_CPP_BACKTRACE) == (True, True)
    config.API.COMPRESS = config.APP.DISABLE_CPP_BACKTRACE = False
    assert (config.API.COMPRESS, config.APP.DISABLE_CPP_BACKTRACE) == (False, False)


def test_the_secret_of_a_notebook_is_the_last_key(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import types

    import nnsight.config

    asked: list[str] = []

    def get(name: str) -> str:
        asked.append(name)
        if len(asked) == 1:
            raise TimeoutError("no access")
        return "of-the-notebook"

    monkeypatch.setattr(nnsight.config, "_secrets", [])
    colab = types.ModuleType("google.colab")
    colab.userdata = types.SimpleNamespace(get=get)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "google", types.ModuleType("google"))
    monkeypatch.setitem(sys.modules, "google.colab", colab)
    config = Config()
    monkeypatch.setenv("NDIF_API_KEY", "of-the-environment")
    assert config.API.KEY == "of-the-environment" and asked == []
    monkeypatch.delenv("NDIF_API_KEY")
    assert config.API.KEY is None and config.API.KEY is None
    assert asked == ["NDIF_API_KEY"]  # asked once, and silent about the failure
    monkeypatch.setattr(nnsight.config, "_secrets", [])
    assert config.API.KEY == "of-the-notebook"
    assert "of-the-notebook" not in repr(config)
    write(path, {"API": {"KEY": "of-the-file"}})
    assert Config().API.KEY == "of-the-file"


def test_another_name_of_the_key() -> None:
    config = Config()
    config.API.APIKEY = "hidden-key"
    assert config.API.KEY == config.API.APIKEY == "hidden-key"
    assert "APIKEY" not in repr(config)
    with pytest.raises(TypeError, match=r"CONFIG\.API\.KEY is of type str"):
        config.API.APIKEY = 7
