"""``nnsight vllm serve``: vLLM's OpenAI-compatible server, with edits in the graph of the model.

It takes the options of ``vllm serve`` and five of its own. Options with which tables do not work are refused before the engine starts.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Any
from unittest import mock

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server import entry
from vllm.entrypoints.launchers.launcher import setup_server
from vllm.logger import configure_logging_from_args
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser

from ...steering.registry import Vectors, named_file
from ..steering.graph_programs import GraphProgram
from ..worker.engine_taps import Layout
from ..worker.runner import check, choose_runner

try:
    from vllm.entrypoints.common.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.common.startup import cli_env_setup
except ImportError:  # vLLM 0.32
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup

WORKER = f"{__package__.rpartition('.')[0]}.worker.worker.ServingWorker"

#: Options of vLLM that start another kind of server or worker.
_OTHER_SERVERS = ("worker_cls", "api_server_count", "headless", "grpc")

_NOT_TOGETHER = (
    "{} cannot be used with --edits or --programs: one process has to manage all tables, and each table needs the rows of a whole step."
)


def main(arguments: Sequence[str]) -> None:
    """Serve until a signal ends the server. Raise ``ValueError`` for wrong options, and ``OSError`` if a file cannot be read."""
    import uvloop

    cli_env_setup()
    choose_runner()
    parser = FlexibleArgumentParser(
        prog="nnsight vllm serve",
        usage="nnsight vllm serve MODEL [--edits PATTERN ...] [--vectors NAME=FILE ...] [--programs NAME=FILE ...] [options of vllm serve]",
        description="vLLM's OpenAI-compatible server, for requests that are steered (docs/vllm.md).",
    )
    own = parser.add_argument_group("steering")
    own.add_argument("--edits", nargs="+", metavar="PATTERN", help="layers that can be steered, such as 'model.layers.*'")
    own.add_argument("--slots", type=int, default=16, help="how many different edits may run at a time (default: 16)")
    own.add_argument("--rank", type=int, default=1, help="how many directions each may remove (default: 1)")
    own.add_argument("--vectors", nargs="+", default=[], metavar="NAME=FILE", help="safetensors, or control vectors in GGUF")
    own.add_argument("--programs", nargs="+", default=[], metavar="NAME=FILE", help="programs that requests can ask for")
    args: Any = make_arg_parser(parser).parse_args(list(arguments))
    configure_logging_from_args(args)
    validate_parsed_serve_args(args)
    uvloop.run(_serve(args, *_prepare(args)))


def _prepare(args: Any) -> tuple[Vectors, dict[str, GraphProgram]]:
    """Add the options that edits need to vLLM's options. Return the vectors, and the programs by name."""
    if args.model_tag is not None:
        args.model = args.model_tag
    if args.model == "nnsight/demo":
        from ...modeling.huggingface import folder_or_name

        args.model, args.served_model_name = str(folder_or_name(args.model)), args.served_model_name or ["nnsight/demo"]
    if not args.edits and not args.programs:
        raise ValueError("--edits is missing: name the layers that can be steered, as in `--edits 'model.layers.*'`, or use --programs.")
    if args.slots < 1 or args.rank < 0:
        raise ValueError("--slots has to be at least 1, and --rank at least 0.")
    for name in _OTHER_SERVERS:
        value = getattr(args, name)
        if value and value not in ("auto", 1):
            raise ValueError(_NOT_TOGETHER.format(f"--{name.replace('_', '-')}"))
    vectors = Vectors()
    for given in args.vectors:
        vectors.load_named(given)
    files = dict(named_file("--programs", given) for given in args.programs)
    programs = {name: GraphProgram.of(name, path) for name, path in files.items()}
    modules = tuple(path for program in programs.values() for path in program.modules)
    digests = tuple(program.digest for program in programs.values())
    args.worker_cls = WORKER
    layout = Layout(edits=tuple(args.edits or ()), slots=args.slots, rank=args.rank, programs=digests, programmed=modules)
    args.additional_config = {**(args.additional_config or {}), "nnsight": layout.description, "nnsight_programs": files}
    return vectors, programs


async def _serve(args: Any, vectors: Vectors, programs: dict[str, GraphProgram]) -> None:
    """Run engine and server. This does the same as vLLM's ``run_server``, but with another client and more routes."""
    from .client import SteeringClient
    from .http import install

    engine_args = AsyncEngineArgs.from_cli_args(args)
    config = engine_args.create_engine_config(UsageContext.OPENAI_API_SERVER)
    parallel = config.parallel_config
    refused = {
        "data parallelism": parallel.data_parallel_size > 1,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "context parallelism": parallel.prefill_context_parallel_size > 1,
        "splitting steps into micro-batches": parallel.use_ubatching,
        "LoRA": config.lora_config is not None,
    }
    for what, found in refused.items():
        if found:
            raise ValueError(_NOT_TOGETHER.format(what))
    check(config, tables=True)
    vectors.fit(config.model_config.get_hidden_size())
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # until the server installs its handlers
    address, sock = setup_server(args, reuse_port=False)  # before the slow start of the engine: the port may be in use
    client = SteeringClient.from_vllm_config(
        config,
        usage_context=UsageContext.OPENAI_API_SERVER,
        enable_log_requests=engine_args.enable_log_requests,
        aggregate_engine_logging=engine_args.aggregate_engine_logging,
        disable_log_stats=engine_args.disable_log_stats,
    )
    build = entry.build_app

    def with_routes(*arguments: Any, **options: Any) -> Any:
        app = build(*arguments, **options)
        install(app)
        return app

    try:
        await client.prepare(vectors, programs)
        await client.reset_mm_cache()
        with mock.patch.object(entry, "build_app", with_routes):
            stopped = await entry.build_and_serve(client, address, sock, args)
    finally:
        client.shutdown(timeout=config.shutdown_timeout)
    try:
        await stopped
    finally:
        sock.close()
