"""Import paths of the public documentation, and what importing the package brings with it."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from importlib import import_module

import pytest
import torch

import nnsight
from nnsight import late_binding

PATHS = [
    ("nnsight.intervention.envoy", "Envoy", "nnsight.envoy.envoy"),
    ("nnsight.intervention.envoy", "eproperty", "nnsight.runtime.modules.eproperty"),
    ("nnsight.intervention.envoy", "IEnvoy", "nnsight.runtime.modules.eproperty"),
    ("nnsight.intervention.eproperty", "eproperty", "nnsight.runtime.modules.eproperty"),
    ("nnsight.intervention.eproperty", "IEnvoy", "nnsight.runtime.modules.eproperty"),
    ("nnsight.intervention.source", "Source", "nnsight.envoy.source"),
    ("nnsight.intervention.source", "SourceError", "nnsight.runtime.modules.listing"),
    ("nnsight.intervention.source", "OperationEnvoy", "nnsight.envoy.source"),
    ("nnsight.intervention.envoy", "traceable", "nnsight.envoy.methods"),
    ("nnsight.intervention.cache", "Cache", "nnsight.runtime.cache"),
    ("nnsight.intervention.cache", "CacheView", "nnsight.runtime.cache"),
    ("nnsight.intervention.barrier", "Barrier", "nnsight.runtime.invoker"),
    ("nnsight.intervention.tracer", "InterleavingTracer", "nnsight.runtime.tracer"),
    ("nnsight.intervention.tracer", "ScanningTracer", "nnsight.modeling.scanning"),
    ("nnsight.intervention.tracer", "Invoker", "nnsight.runtime.invoker"),
    ("nnsight.intervention.editing", "EditingTracer", "nnsight.runtime.editing"),
    ("nnsight.intervention.iterator", "IteratorTracer", "nnsight.runtime.iteration"),
    ("nnsight.intervention.backward", "BackwardsTracer", "nnsight.runtime.gradients"),
    ("nnsight.schema.config", "CONFIG", "nnsight"),
    ("nnsight.schema.config", "Config", "nnsight.config"),
    ("nnsight.schema.config", "ApiConfig", "nnsight.config"),
    ("nnsight.schema.config", "AppConfig", "nnsight.config"),
    ("nnsight.tracing.tracer", "WithBlockNotFoundError", "nnsight.tracing"),
    ("nnsight.tracing.tracer", "save", "nnsight"),
    ("nnsight.intervention.hooks", "requires_output", "nnsight.runtime.modules.eproperty"),
    ("nnsight.intervention.hooks", "requires_input", "nnsight.runtime.modules.eproperty"),
    ("nnsight.intervention.interleaver", "Interleaver", "nnsight.compat.interleaver"),
    ("nnsight.intervention.interleaver", "Mediator", "nnsight.compat.mediator"),
    ("nnsight.intervention.interleaver", "eproperty", "nnsight.runtime.modules.eproperty"),
    ("nnsight.intervention.interleaver", "IEnvoy", "nnsight.runtime.modules.eproperty"),
    ("nnsight.intervention.interleaver", "OutOfOrderError", "nnsight.runtime.errors"),
    ("nnsight.intervention.interleaver", "MissedProviderError", "nnsight.runtime.errors"),
    ("nnsight.intervention.interleaver", "EarlyStopException", "nnsight.runtime.errors"),
    ("nnsight.intervention.interleaver", "SkipException", "nnsight.runtime.errors"),
    ("nnsight.intervention.interleaver", "Events", "nnsight.compat.events"),
    ("nnsight.intervention.interleaver", "Value", "nnsight.compat.events"),
    ("nnsight.intervention.batching", "Batcher", "nnsight.compat.interleaver"),
    ("nnsight.intervention.hooks", "requires_operation_output", "nnsight.runtime.modules.eproperty"),
    ("nnsight.intervention.hooks", "requires_operation_input", "nnsight.runtime.modules.eproperty"),
    ("nnsight.intervention.batching", "BatchGroup", "nnsight.runtime.rows.batching"),
    ("nnsight.intervention.backends.base", "Backend", "nnsight.tracing"),
    ("nnsight.intervention.backends.remote", "RemoteBackend", "nnsight.remote.client.remote_backend"),
    ("nnsight.intervention.backends.execution", "ExecutionBackend", "nnsight.tracing"),
    ("nnsight.intervention.tracing.base", "Tracer", "nnsight.tracing"),
    ("nnsight.intervention.tracing.tracer", "InterleavingTracer", "nnsight.runtime.tracer"),
    ("nnsight.intervention.tracing.tracer", "Barrier", "nnsight.runtime.invoker"),
    ("nnsight.intervention.tracing.tracer", "Cache", "nnsight.runtime.cache"),
    ("nnsight.intervention.tracing.tracer", "ScanningTracer", "nnsight.modeling.scanning"),
    ("nnsight.intervention.tracing.editing", "EditingTracer", "nnsight.runtime.editing"),
    ("nnsight.intervention.tracing.iterator", "IteratorTracer", "nnsight.runtime.iteration"),
    ("nnsight.intervention.tracing.backwards", "BackwardsTracer", "nnsight.runtime.gradients"),
    ("nnsight.intervention.tracing.invoker", "Invoker", "nnsight.runtime.invoker"),
    ("nnsight.intervention.tracing.util", "wrap_exception", "nnsight.tracing"),
    ("nnsight.intervention.tracing.util", "WithBlockNotFoundError", "nnsight.tracing"),
]


@pytest.mark.parametrize(("module", "name", "home"), PATHS)
def test_documented_paths_are_the_objects_themselves(module: str, name: str, home: str) -> None:
    found = import_module(module)
    assert getattr(found, name) is getattr(import_module(home), name)
    assert name in found.__all__


@pytest.mark.slow
def test_documented_paths_are_attributes_without_an_import_of_their_own() -> None:
    """In a fresh process each: here, other tests have imported them."""
    paths = [
        *{module: f"{module}.{name}" for module, name, _ in PATHS}.values(),
        "nnsight.intervention.tracing.globals.Globals",
        "nnsight.modeling.base.NNsight",
        "nnsight.modeling.language.LanguageModel",
        "nnsight.modeling.mixins.MetaMixin",
        "nnsight.modeling.mixins.meta.MetaMixin",
        "nnsight.modeling.mixins.loadable.LoadableMixin",
        "nnsight.modeling.transformers.TransformersModel",
        "nnsight.modeling.huggingface.HuggingFaceModel",
        "nnsight.modeling.vlm.VisionLanguageModel",
        "nnsight.modeling.mixins.remotable.Remotable",
        "nnsight.runtime.batched_containers.register_batched_container",
        "nnsight.modeling.mixins.loadable.Loadable",
        "nnsight.modeling.mixins.meta.Meta",
        "nnsight.modeling.mixins.meta.MetaDevice",
        "nnsight.modeling.mixins.remotable.Remotable",
        "nnsight.tracing.tracer.Tracer",
        "nnsight.tracing.backend.Backend",
        "nnsight.util.apply",
        "nnsight.remote.protocol",
        "nnsight.fx.counters",
        "nnsight.envoy.Envoy",
        "nnsight.modeling.vllm.VLLM",
        "nnsight.program.counts.counts",
        "nnsight.remote.counts.counts",
        "nnsight.remote.protocol.ModelKey",
    ]
    code = "import os, sys, torch, transformers.generation, nnsight\n"  # what is not ours, once for all
    code += "for path in sys.argv[1:]:\n"
    code += "    if os.fork() == 0: eval(path); os._exit(0)\n"
    code += "    if os.wait()[1]: sys.exit(path)\n"
    done = subprocess.run([sys.executable, "-c", code, *paths], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_packages_list_their_modules_and_have_no_others() -> None:
    assert {"batching", "envoy", "hooks", "interleaver", "tracing", "backends"} <= set(dir(nnsight.intervention))
    assert {"intervention", "modeling", "fx", "util", "CONFIG", "NNsight"} <= set(dir(nnsight))
    for package in (nnsight.intervention, nnsight.intervention.tracing, nnsight.modeling):
        with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute 'nonsense'"):
            package.nonsense  # noqa: B018
        assert not hasattr(package, "__wrapped__")


def test_names_of_models_and_of_what_they_are_made_of() -> None:
    from nnsight.intervention import cache, source
    from nnsight.modeling.huggingface import HuggingFaceModel
    from nnsight.modeling.mixins import LoadableMixin, MetaMixin, RemoteableMixin
    from nnsight.modeling.mixins.loadable import Loadable
    from nnsight.modeling.mixins.meta import Meta
    from nnsight.modeling.mixins.remotable import Remotable
    from nnsight.modeling.transformers import TransformersModel
    from nnsight.modeling.vlm import VisionLanguageModel

    assert (Loadable, Meta, Remotable) == (LoadableMixin, MetaMixin, RemoteableMixin)
    assert nnsight.TransformersModel is TransformersModel and nnsight.VisionLanguageModel is VisionLanguageModel
    bases = [TransformersModel, HuggingFaceModel, Remotable, Meta, Loadable, nnsight.NNsight]
    assert [kind for kind in nnsight.LanguageModel.__mro__ if kind in bases] == bases
    assert source.SourceEnvoy is source.OperationEnvoy and source.SourceNotAvailable is source.SourceError
    assert cache.Entry.__name__ == "CacheEntry"


def test_modules_without_memory() -> None:
    from nnsight.modeling.mixins.meta import MetaDevice

    kept = torch.ones(2)
    with MetaDevice():
        module = torch.nn.Sequential(torch.nn.Linear(2, 2, device="cpu"), torch.nn.LayerNorm(2)).to("cuda", torch.float16)
        made, there = torch.tensor([1.0]).to("cpu").double(), kept + 1
    assert {(parameter.device.type, parameter.dtype) for parameter in module.parameters()} == {("meta", torch.float16)}
    assert made.is_meta and made.dtype == torch.float64 and there.tolist() == [2.0, 2.0]
    assert torch.ones(1).device.type == "cpu"


def test_errors_are_one_family() -> None:
    from nnsight.intervention.interleaver import Mediator, MissedProviderError, OutOfOrderError

    assert issubclass(OutOfOrderError, MissedProviderError)
    assert issubclass(MissedProviderError, ValueError)
    assert Mediator.OutOfOrderError is OutOfOrderError
    assert Mediator.MissedProviderError is MissedProviderError


def test_the_errors_and_events_of_the_documents() -> None:
    from greenlet import GreenletExit

    from nnsight.intervention.interleaver import NNSIGHT_PREFIX, Cancelation, SkipException
    from nnsight.intervention.tracing.globals import Globals
    from nnsight.tracing.errors import BLOCK_NAME

    assert Cancelation is GreenletExit
    assert SkipException(3).value == 3
    assert BLOCK_NAME.startswith(NNSIGHT_PREFIX)
    assert callable(Globals.enter) and callable(Globals.exit) and callable(Globals.cache.clear)
    assert importlib.import_module("nnsight.modeling.base").NNsight is nnsight.NNsight


def test_every_module_of_the_documented_paths_can_be_imported_first() -> None:
    """In a fresh process each, for an import cycle shows in one order only."""
    import nnsight.intervention

    names = [module.name for module in pkgutil.walk_packages(nnsight.intervention.__path__, "nnsight.intervention.")]
    assert len(names) >= 15
    code = "import importlib, os, sys, torch, transformers.generation\n"  # what is not ours, once for all
    code += "for name in sys.argv[1:]:\n"
    code += "    if os.fork() == 0: importlib.import_module(name); os._exit(0)\n"
    code += "    if os.wait()[1]: sys.exit(name)\n"
    done = subprocess.run([sys.executable, "-c", code, *names], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_top_level_names() -> None:
    for name in nnsight.__all__:
        assert getattr(nnsight, name) is not None
        assert name in dir(nnsight)
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        nnsight.nonsense  # noqa: B018


BROKEN = """
import sys
import nnsight
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[2]:
            object().gone
sys.meta_path.insert(0, Finder())
try:
    exec(sys.argv[1])
except ImportError as error:
    assert type(error.__cause__) is AttributeError, repr(error.__cause__)
    print(error)
"""


@pytest.mark.parametrize(
    ("use", "module"),
    [
        ("from nnsight import LanguageModel", "transformers"),
        ("from nnsight import NNsight", "nnsight.modeling.base"),
        ("nnsight.fx", "nnsight.fx"),
    ],
)
def test_a_module_that_fails_while_it_is_imported_shows_its_own_error(use: str, module: str) -> None:
    """Python takes an ``AttributeError`` of a lazy name for its absence and would say nothing of the cause."""
    done = subprocess.run([sys.executable, "-c", BROKEN, use, module], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    name = use.replace(".", " ").split()[-1]
    assert done.stdout.startswith(f"`nnsight.{name}` could not be imported from `nnsight.")
    assert "'object' object has no attribute 'gone'" in done.stdout


CODE = """
import sys
import nnsight
heavy = {"torch", "transformers", "torch._dynamo", "torch._inductor", "nnsight.fx", "nnsight.modeling.language", "sympy"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
import torch
eager = torch.nn.Sequential(torch.nn.Linear(2, 2))
model = nnsight.NNsight(eager)
with model.trace(torch.ones(1, 2)):
    hidden = model[0].output
    with hidden.sum().backward():
        gradient = hidden.grad.save()
with model.edit() as edited:
    model[0].output[:] = 0
with edited.trace(torch.ones(1, 2)) as tracer:
    cache = tracer.cache()
assert gradient.tolist() == [[1.0, 1.0]]
assert cache["model.0"].output.tolist() == [[0.0, 0.0]]
compiler = {"transformers", "torch._dynamo", "torch._inductor", "nnsight.fx"} & set(sys.modules)
assert not compiler, compiler
print("light")
"""


def test_importing_is_light_and_eager_traces_need_no_compiler(tmp_path: object) -> None:
    script = f"{tmp_path}/script.py"
    with open(script, "w") as file:
        file.write(CODE)
    done = subprocess.run([sys.executable, "-W", "error", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "light\n"


def test_names_of_early_releases_say_what_to_write_instead() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'list'; .* Python's own"):
        nnsight.list  # noqa: B018
    with pytest.raises(AttributeError, match=r"no attribute 'unknown'$"):
        nnsight.unknown  # noqa: B018


def test_the_functions_that_lower_layers_look_up_exist() -> None:
    for name in late_binding._modules:
        assert callable(late_binding.late(name)), name
