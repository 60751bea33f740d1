"""Changes of shared objects, which last as long as a context needs them."""

from __future__ import annotations

import threading
import types

import pytest

from nnsight.shared_changes import SharedChange, replaced


class Base:
    def method(self) -> str:
        return "base"


class Derived(Base):
    pass


def test_an_attribute_is_replaced_and_put_back() -> None:
    module = types.ModuleType("module")
    module.name = "before"  # type: ignore[attr-defined]
    with pytest.raises(KeyError), replaced(module, "name", "meanwhile"), replaced(module, "other", "new"):
        assert (module.name, module.other) == ("meanwhile", "new")
        raise KeyError
    assert module.name == "before"
    assert not hasattr(module, "other")


def test_what_a_class_inherits_is_inherited_again() -> None:
    with replaced(Derived, "method", lambda self: "derived"):
        assert Derived().method() == "derived"
        assert Base().method() == "base"
    assert "method" not in vars(Derived)
    assert Derived().method() == "base"


def changes() -> tuple[SharedChange, list[str]]:
    log: list[str] = []

    def make() -> str:
        log.append("made")
        return "undone"

    return SharedChange(make, log.append), log


def test_the_first_makes_the_change_and_the_last_undoes_it() -> None:
    change, log = changes()
    with change:
        with pytest.raises(KeyError), change:
            raise KeyError
        assert log == ["made"]
    assert log == ["made", "undone"]
    with change:
        pass
    assert log == ["made", "undone", "made", "undone"]


def test_contexts_of_several_threads_overlap() -> None:
    change, log = changes()
    entered, may_leave = threading.Event(), threading.Event()

    def other() -> None:
        with change:
            entered.set()
            may_leave.wait(10)

    with change:
        thread = threading.Thread(target=other)
        thread.start()
        assert entered.wait(10)
    assert log == ["made"]
    may_leave.set()
    thread.join()
    assert log == ["made", "undone"]


def test_a_change_that_fails_has_no_users() -> None:
    fails = [True]

    def make() -> None:
        if fails:
            raise KeyError

    shared = SharedChange(make, lambda _: None)
    with pytest.raises(KeyError), shared:
        pass
    fails.clear()
    with shared:
        assert shared._users == 1
