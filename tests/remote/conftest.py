"""Fixtures of the remote tests: models, and servers whose engine obeys orders."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import nnsight
from nnsight import CONFIG
from nnsight.remote.client.remote_backend import client_of
from nnsight.remote.protocol import ModelKey
from nnsight.remote.server.models import engine_of

from .remoting import Accounts, Orders, Running, account, running


@pytest.fixture(scope="session")
def demo() -> Any:
    """The model that servers know by name."""
    return nnsight.demo_model()


@pytest.fixture(scope="session")
def model(demo: Any) -> Any:
    """A smaller model with the tokens of the demo."""
    torch.manual_seed(0)
    config = GPT2Config(n_layer=3, n_embd=32, n_head=2, vocab_size=1024, bos_token_id=0, eos_token_id=0)
    return nnsight.LanguageModel(GPT2LMHeadModel(config).eval(), demo.tokenizer)


@pytest.fixture(scope="module")
def here(demo: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server of the demo model, for which remote=True stands."""
    with running(engine_of(demo), tmp_path_factory.mktemp("jobs"), key=ModelKey("nnsight/demo")) as server:
        CONFIG.API.HOST, CONFIG.APP.REMOTE_LOGGING = server.url, False
        yield server
        del CONFIG.API.HOST, CONFIG.APP.REMOTE_LOGGING
        client_of(server.url).close()


@pytest.fixture
def orders() -> Orders:
    return Orders()


@pytest.fixture
def server(orders: Orders, tmp_path: Path) -> Iterator[Running]:
    with running(orders.engine(), tmp_path / "jobs") as server:
        yield server
        orders.gate.set()


@pytest.fixture
def guarded(orders: Orders, tmp_path: Path) -> Iterator[Running]:
    """A server with keys."""
    door = Accounts(a=account("alice", queue=2, bytes=4096, seconds=0.2), b=account("bob"))
    with running(orders.engine(), tmp_path / "jobs", door=door) as server:
        yield server
        orders.gate.set()
