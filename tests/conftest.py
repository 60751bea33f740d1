"""What all tests share: thread setting, comparisons, tiny models, and an independent reference made of plain torch hooks."""

from __future__ import annotations

import gc
import inspect
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from transformers import GPT2Model

import nnsight
from nnsight import CONFIG, LanguageModel, NNsight, fx

torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # of a shell that runs the tests in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
logging.getLogger("transformers").setLevel(logging.ERROR)
# pytest listens on loggers that do not propagate; torch then renders megabytes of its structured log for it.
logging.getLogger("torch.__trace").propagate = True


#: The argument that is a call's key-value cache; transformers renamed it in 5.24.
CACHE = "cache" if "cache" in inspect.signature(GPT2Model.forward).parameters else "past_key_values"


def pytest_configure(config: pytest.Config) -> None:
    # `pytest -v` is no wish for all frames of tracebacks, see `CONFIG.APP.DEBUG`.
    sys.argv[:] = [argument for argument in sys.argv if argument not in ("-v", "--verbose")]
    config.addinivalue_line("markers", "slow: takes seconds, because a backend generates and compiles code")
    # Inductor imports parts of torch that torch itself has deprecated.
    config.addinivalue_line("filterwarnings", "ignore:`torch.jit:DeprecationWarning")
    # Making a fake of a tensor that is no leaf looks at its gradient; torch hides that warning, unless it is an error.
    config.addinivalue_line("filterwarnings", "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@pytest.fixture(autouse=True)
def _seed_and_counters() -> None:
    torch.manual_seed(0)
    fx.counters.reset()


@pytest.fixture(autouse=True)
def _options_as_before() -> Iterator[None]:
    """Let the next test find the options that this one found, and the same origin of each.

    Set up before ``monkeypatch``, so that it ends after what ``monkeypatch`` puts back, which counts as assigned.
    """
    assigned = [(section._assigned, dict(section._assigned)) for section in (CONFIG.APP, CONFIG.API)]
    yield
    for found, before in assigned:
        found.clear()
        found.update(before)


@pytest.fixture(autouse=True)
def _compiled_is_compiled(
    request: pytest.FixtureRequest, _options_as_before: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """In the ``compiled`` half of a test, blocks become part of captured graphs: nothing falls back to Python unseen.

    Each run of a block that waits for a value has to meet a captured graph. Exceptions are runs that end with an error, and runs of a
    method, which is Python and need not call the model. A half that runs eager traces only is a mistake in the test.
    """
    callspec = getattr(request.node, "callspec", None)
    if callspec is None or callspec.params.get("compile") is not True:
        yield
        return
    from nnsight.fx.driver import CompiledDriver
    from nnsight.fx.replay.playback import Playback
    from nnsight.runtime.eager import EagerDriver

    modes: list[str] = []
    around, dispatch = CompiledDriver.around, Playback.dispatch

    def noted(driver: Any, mode: str, captured: bool) -> Any:
        def run(interleaver: Any, args: Any, kwargs: Any, report: Any) -> Any:
            waits = bool(interleaver.waited)
            result = driver(interleaver, args, kwargs, report)
            modes.append(mode)
            assert report.graphs or not (captured and waits), "the model ran without a captured graph"
            return result

        return run

    def replayed(*arguments: Any) -> Any:
        modes.append("compiled")
        return dispatch(*arguments)

    for kind, mode in ((EagerDriver, "eager"), (CompiledDriver, "compiled")):
        call = kind.__call__
        captured = mode == "compiled"
        monkeypatch.setattr(
            kind, "__call__", lambda self, *rest, call=call, how=(mode, captured): noted(partial(call, self), *how)(*rest)
        )
    monkeypatch.setattr(CompiledDriver, "around", lambda self, function: noted(around(self, function), "compiled", False))
    monkeypatch.setattr(Playback, "dispatch", replayed)
    yield
    assert not modes or "compiled" in modes, "no trace of this test ran compiled"


@pytest.fixture
def own_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing of the user's options, file or cache folder be seen or changed."""
    for variable in list(os.environ):
        if variable.startswith(("NNSIGHT_", "NDIF_")):
            monkeypatch.delenv(variable)
    monkeypatch.setenv("NNSIGHT_CONFIG", str(tmp_path / "config.json"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(CONFIG._file, "_values", None)


@pytest.fixture
def no_grad() -> Iterator[None]:
    """Run the test without gradients; ``pytestmark = pytest.mark.usefixtures("no_grad")`` does so for a file."""
    with torch.no_grad():
        yield


@pytest.fixture(scope="session")
def vllm_environment() -> Iterator[None]:
    """Let vLLM stay offline, leave threads where they are, and say only what is wrong."""
    chosen = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    before = {name: os.environ.get(name) for name in chosen}
    os.environ.update(chosen)
    yield
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory, vllm_environment: None) -> Path:
    """The small Llama of the tests on vLLM."""
    from .vllm.llama import save_tiny_llama

    return save_tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def reference(folder: Path) -> LanguageModel:
    """The same in transformers."""
    return LanguageModel(folder, dtype="float32", dispatch=True)


@pytest.fixture(scope="session")
def vector() -> torch.Tensor:
    """A direction of its hidden state."""
    from .vllm.llama import HIDDEN

    return torch.randn(HIDDEN, generator=torch.Generator().manual_seed(1)) * 4


both = pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])


# -- comparisons ------------------------------------------------------------------------------------------------------


def same(found: Any, expected: Any) -> None:
    """Assert equality bit by bit, through containers: structure, types, shapes, dtypes and values.

    A comparison of nothing (empty containers or tensors, ``None``) is an error in the test, and fails.
    """
    _compare(found, expected, rtol=0.0, atol=0.0)


def close(found: Any, expected: Any) -> None:
    """Assert the same up to rounding: padding and batching change the order of sums.

    The tolerance follows the largest number of a tensor, so that it does not hide a tensor of small numbers.
    """
    _compare(found, expected, rtol=1e-4, atol=1e-4)


def _compare(found: Any, expected: Any, rtol: float, atol: float) -> None:
    mine, structure = pytree.tree_flatten(found)
    wanted, wanted_structure = pytree.tree_flatten(expected)
    assert structure == wanted_structure
    compared = 0
    for one, other in zip(mine, wanted, strict=True):
        if isinstance(other, torch.Tensor):
            assert type(one) is torch.Tensor
            scale = min(1.0, float(other.detach().abs().max())) if other.is_floating_point() and other.numel() else 1.0
            torch.testing.assert_close(one, other, rtol=rtol, atol=atol * scale)
            compared += other.numel()
        else:
            assert type(one) is type(other)
            assert one == other
            compared += other is not None
    assert compared, "nothing was compared"


def agree(run: Callable[[bool], tuple[Any, Any]], expected: Any, graphs: int = 1) -> None:
    """Assert that ``run(compile)`` gives ``expected``: eagerly, compiled, and compiled again without any new work."""
    for compile in (False, True, True):
        fx.counters.reset()
        found, tracer = run(compile)
        same(found, expected)
        assert tracer.report.mode == ("compiled" if compile else "eager")
        assert tracer.report.graphs == (graphs if compile else 0)
        assert not tracer.report.breaks
    assert fx.counters.captures == fx.counters.recordings == fx.counters.compiles == fx.counters.breaks == 0


# -- an independent reference ---------------------------------------------------------------------------------------


class Hooks:
    """Edits and reads of a model by plain torch hooks, for comparison.

    A hook function gets the value of its location and may return a replacement; ``None`` keeps the value.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self._hooks: list[tuple[str, str, Callable[[Any], Any]]] = []
        self.seen: dict[str, Any] = {}

    def output(self, path: str, function: Callable[[Any], Any]) -> Hooks:
        """Apply ``function`` to what the module at ``path`` returns."""
        self._hooks.append(("output", path, function))
        return self

    def input(self, path: str, function: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> Hooks:
        """Apply ``function`` to ``(args, kwargs)`` of the module at ``path``."""
        self._hooks.append(("input", path, function))
        return self

    def keep(self, name: str, choose: Callable[..., Any] = lambda value: value) -> Callable[..., None]:
        """Return a hook function that keeps a copy of ``choose(value)`` in ``seen[name]``."""

        def function(*value: Any) -> None:
            chosen = choose(*value)
            self.seen[name] = chosen.clone() if isinstance(chosen, torch.Tensor) else chosen

        return function

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Have the hooks on the model, for calls of other kinds."""
        handles = []
        for kind, path, function in self._hooks:
            module = self.model.get_submodule(path)
            if kind == "output":
                handles.append(module.register_forward_hook(lambda _, __, out, function=function: function(out)))
            else:
                handles.append(
                    module.register_forward_pre_hook(
                        lambda _, a, k, function=function: function(a, k), with_kwargs=True
                    )
                )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.installed():
            return self.model(*args, **kwargs)


@pytest.fixture
def hooks() -> type[Hooks]:
    return Hooks


def assert_no_instrumentation(module: torch.nn.Module) -> None:
    """Assert that nothing of this package is left on the modules; transformers leaves hooks where outputs were asked for."""
    for child in module.modules():
        assert "_call_impl" not in child.__dict__
        hooks = [*child._forward_hooks.values(), *child._forward_pre_hooks.values()]
        assert all(hook.__module__.startswith("transformers.") for hook in hooks)


@pytest.fixture
def clean() -> Callable[[torch.nn.Module], None]:
    return assert_no_instrumentation


@pytest.fixture
def no_gc() -> Iterator[None]:
    """Let objects go by reference counting alone."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def _lean_process() -> Iterator[None]:
    """Let go of what dynamo and fake tensors keep of the models of a file, over which each collection would walk."""
    gc.freeze()  # modules and classes, most of all; they stay frozen, as there are so many of them
    yield
    torch._dynamo.reset()
    torch._subclasses.FakeTensorMode.cache_clear()
    gc.collect()  # of what this file has made: what was there before stays frozen meanwhile
    gc.unfreeze()


# -- small models and inputs -----------------------------------------------------------------------------------------


class Layer(torch.nn.Module):
    """Returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.tanh(self.inner(x)), None


class Rows(NNsight):
    """Joins the tensors of several invokes along their first dimension."""

    def _batch(self, batched: Any, *args: Any, **kwargs: Any) -> tuple[Any, int]:
        if batched is None:
            return (args, kwargs), args[0].shape[0]
        joined = tuple(torch.cat(pair) for pair in zip(batched[0], args, strict=True))
        return (joined, kwargs), args[0].shape[0]


@pytest.fixture
def a() -> torch.Tensor:
    return torch.randn(2, 4)


@pytest.fixture
def b() -> torch.Tensor:
    return torch.randn(2, 4)


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(2, 3)


@pytest.fixture
def model() -> NNsight:
    """The small model of the guide, which no test may change."""
    from .contract.guide import tower

    return tower()


@pytest.fixture
def lm() -> LanguageModel:
    """The random language model of the guide, which no test may change."""
    from .contract.guide import language_model

    return language_model()


@pytest.fixture(scope="module")
def demo() -> LanguageModel:
    """The demo model, one for each file."""
    return nnsight.demo_model(compile={"backend": "eager"})


# -- transformers models ---------------------------------------------------------------------------------------------


@dataclass
class Case:
    """A tiny transformers model and where its parts are.

    Attributes:
        name: Name of the architecture.
        build: Makes the model.
        layers: Path of the list of layers.
        attention: Path of a module that returns a tuple, below a layer.
        mlp: Path of a module that returns a tensor, below a layer.
        by_keyword: Path of a module, below a layer, that gets tensors by keyword, and the keyword.
    """

    name: str
    build: Callable[[], torch.nn.Module]
    layers: str
    attention: str
    mlp: str
    by_keyword: tuple[str, str]
    layer_returns_tuple: bool = False

    @cached_property
    def module(self) -> torch.nn.Module:
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self.build().eval()

    @cached_property
    def model(self) -> NNsight:
        """Wrapped, with the backend that changes no bit."""
        return NNsight(self.module, compile={"backend": "eager"})

    def inputs(self, length: int = 6, batch: int = 1, seed: int = 0) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 * seed + length)
        ids = torch.randint(2, 96, (batch, length), generator=generator)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if self.name == "t5":
            inputs["decoder_input_ids"] = ids[:, :4].clone()
        return inputs

    def layer(self, index: int) -> str:
        return f"{self.layers}.{index}"


def output_of(envoy: Any) -> Any:
    """Return ``envoy.output`` also where a child has that name."""
    return envoy.nns_output if "output" in envoy._children else envoy.output


def _cases() -> dict[str, Case]:
    import transformers as t

    small: dict[str, Any] = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
    }
    sizes_of_gpt2 = {"n_layer": 3, "n_embd": 32, "n_head": 4, "vocab_size": 96, "bos_token_id": 0, "eos_token_id": 0}
    sizes_of_t5 = {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 3, "num_heads": 4}

    def like_llama(name: str, kind: str, **more: Any) -> Case:
        def build() -> torch.nn.Module:
            config = getattr(t, f"{kind}Config")(**small, num_key_value_heads=2, **more)
            return getattr(t, f"{kind}ForCausalLM")(config)

        return Case(name, build, "model.layers", "self_attn", "mlp", ("self_attn", "hidden_states"))

    cases = [
        Case(
            "gpt2", lambda: t.GPT2LMHeadModel(t.GPT2Config(**sizes_of_gpt2)), "transformer.h", "attn", "mlp", ("attn", "position_ids")
        ),
        like_llama("llama", "Llama"),
        like_llama("qwen2", "Qwen2"),
        like_llama("qwen3", "Qwen3", head_dim=8),
        like_llama("mixtral", "Mixtral", num_local_experts=4, num_experts_per_tok=2),
        Case(
            "bert",
            lambda: t.BertForMaskedLM(t.BertConfig(**small)),
            "bert.encoder.layer",
            "attention.self",
            "intermediate",
            ("", ""),
        ),
        Case(
            "t5",
            lambda: t.T5ForConditionalGeneration(t.T5Config(**sizes_of_t5, decoder_start_token_id=0, pad_token_id=0)),
            "encoder.block",
            "layer.0.SelfAttention",
            "layer.1",
            ("layer.0.SelfAttention", "position_bias"),
            layer_returns_tuple=True,
        ),
    ]
    return {case.name: case for case in cases}


MODEL_NAMES = ("gpt2", "llama", "qwen2", "qwen3", "mixtral", "bert", "t5")


@pytest.fixture(scope="session")
def cases() -> dict[str, Case]:
    made = _cases()
    for case in made.values():
        # Transformers fills global registries when a model is made; dynamo guards on their sizes.
        with torch.no_grad():
            case.module(**case.inputs())
    return made


#: What else the slow tests look at; the others are much like the Llama.
_LARGE = ("mixtral", "bert", "t5")


@pytest.fixture(params=["gpt2", "llama", *(pytest.param(name, marks=pytest.mark.slow) for name in _LARGE)])
def case(request: pytest.FixtureRequest, cases: dict[str, Case]) -> Case:
    """Some of the transformers models in turn."""
    return cases[request.param]


@pytest.fixture
def gpt2(cases: dict[str, Case]) -> Case:
    return cases["gpt2"]


@pytest.fixture
def llama(cases: dict[str, Case]) -> Case:
    return cases["llama"]


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return the number of inputs and of parameters among them, for each graph that Inductor lowers from here on."""
    from torch._inductor import compile_fx

    found: list[tuple[int, int]] = []
    lower = compile_fx.compile_fx_inner

    def counted(graph: Any, inputs: Any, **settings: Any) -> Any:
        found.append((len(inputs), len(settings.get("static_input_idxs", ()))))
        return lower(graph, inputs, **settings)

    monkeypatch.setattr(compile_fx, "compile_fx_inner", counted)
    return found
