"""Nets of plain torch: recurrence, convolutions in train mode, torch's own attention, shared and tied parts, dicts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .specimen import VOCABULARY, Operation, Specimen, ids

WIDTH = 16


def floats(length: int, batch: int, generator: torch.Generator) -> dict[str, Any]:
    """Make a sequence of vectors."""
    return {"x": torch.randn(batch, length, WIDTH, generator=generator)}


def pictures(length: int, batch: int, generator: torch.Generator) -> dict[str, Any]:
    """Make images as large as ``length`` says."""
    return {"x": torch.randn(batch, 3, length + 3, 8, generator=generator)}


class Feed(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(x)))


class RecurrentLayer(nn.Module):
    """A recurrent cell of torch, which returns its states beside the sequence, and a residual net."""

    def __init__(self, cell: type[nn.RNNBase]) -> None:
        super().__init__()
        self.norm, self.cell, self.mlp = nn.LayerNorm(WIDTH), cell(WIDTH, WIDTH, batch_first=True), Feed()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sequence, _ = self.cell(self.norm(x))
        x = x + sequence
        return x + self.mlp(x)


class AttentionLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), Feed()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        mixed, _ = self.attention(y, y, y)
        x = x + mixed
        return x + self.mlp(x)


class ConvLayer(nn.Module):
    """A residual block that normalises by the statistics of its batch, and edits in place as torchvision's do."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.mlp = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 1)
        self.norm, self.act = nn.BatchNorm2d(width), nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.act(self.norm(self.conv(x))))


class DictLayer(nn.Module):
    """Takes and returns nested dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), Feed()

    def forward(self, state: dict[str, Any]) -> dict[str, Any]:
        hidden = state["hidden"]["now"]
        now = hidden + self.mlp(self.norm(hidden))
        return {"hidden": {"now": now, "before": hidden}, "means": [hidden.mean(-1), state["means"][0]]}


class Tower(nn.Module):
    """Layers between two linear maps."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.first, self.layers, self.head = nn.Linear(WIDTH, WIDTH), nn.ModuleList(layers), nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class ConvTower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 4)
        self.layers = nn.Sequential(ConvLayer(8), ConvLayer(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.stem(x)).mean(dim=(2, 3)))


class DictTower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8)
        self.layers = nn.ModuleList([DictLayer(), DictLayer()])

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        state: dict[str, Any] = {"hidden": {"now": self.first(x), "before": x}, "means": [x.mean(-1)]}
        for layer in self.layers:
            state = layer(state)
        return {"logits": self.head(state["hidden"]["now"]), "inside": {"state": state, "count": len(self.layers)}}


class Encoder(nn.Module):
    """``nn.TransformerEncoder`` and a head."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x))


class Shared(nn.Module):
    """Calls its parts several times: one net in both layers, one norm everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), Feed()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), self.mlp) for _ in range(2)])
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(self.norm(x))
        return self.head(self.norm(x))


class Tied(nn.Module):
    """A language model whose embedding is its head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([RecurrentLayer(nn.GRU), RecurrentLayer(nn.GRU)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def plain_nets() -> list[Specimen]:
    """Return all of them."""
    rnn = {"norm": "layers.0.norm", "attention": "layers.0.cell", "mlp": "layers.0.mlp", "linear": "layers.0.mlp.up"}
    attention = {**rnn, "attention": "layers.0.attention"}
    conv = {"norm": "layers.0.norm", "attention": "layers.0.conv", "mlp": "layers.0.mlp", "linear": "head"}
    encoder = {"norm": "encoder.layers.0.norm1", "attention": "encoder.layers.0.self_attn", "mlp": "encoder.layers.0.linear2",
               "linear": "encoder.layers.0.linear1"}  # fmt: skip
    nested = {"norm": "layers.0.norm", "mlp": "layers.0.mlp", "linear": "layers.0.mlp.up"}
    shared = {"norm": "norm", "mlp": "mlp", "linear": "mlp.up"}
    layers = ("layers.0", "layers.1")
    inside = Operation("layers.0.mlp", "self_act_0", "layers.0.mlp.act")
    return [
        Specimen("lstm", "LSTM", lambda: Tower(RecurrentLayer(nn.LSTM), RecurrentLayer(nn.LSTM)), floats, layers, rnn, inside),
        Specimen("gru", "GRU", lambda: Tower(RecurrentLayer(nn.GRU), RecurrentLayer(nn.GRU)), floats, layers, rnn, inside),
        Specimen("conv", "convolutions, batch norm, edits in place", ConvTower, pictures, layers, conv,
                 Operation("layers.0", "self_conv_0", "layers.0.conv")),
        Specimen("attention", "nn.MultiheadAttention", lambda: Tower(AttentionLayer(), AttentionLayer()), floats, layers,
                 attention, inside),
        Specimen("encoder", "nn.TransformerEncoder", Encoder, floats, ("encoder.layers.0", "encoder.layers.1"), encoder),
        Specimen("dicts", "nested dicts", DictTower, floats, layers, nested, inside),
        Specimen("shared", "shared modules", Shared, floats, layers, shared, Operation("mlp", "self_act_0", "mlp.act")),
        Specimen("tied", "tied weights", Tied, ids, layers, rnn, inside),
    ]  # fmt: skip
