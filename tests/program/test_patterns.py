"""Short blocks as people write them: eager, compiled, as programs, remote, and as edits, eager, compiled and baked, they do the same."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nnsight import NNsight, save
from nnsight.remote import NotExpressibleError

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::nnsight.UncompiledWarning")]

#: One block in each line. ``saved`` is what it saves beside the output of the model.
BLOCKS = """
own = torch.zeros(3, 4); own[:, 1] = m.a.output[:, 1].detach(); saved = own
own = torch.zeros(3, 4); own += m.a.output; saved = own
h = m.a.output; saved = torch.zeros(h.shape[1]); saved += h.sum(0)
v = d * 2; v[0] = 5; m.a.output += v; saved = v
h = m.a.output; s1 = h.clone(); h[:, 0] = 1.0; saved = (s1, h)
h = m.a.output; saved = h; h[:] = 0
h = m.a.output; k = h.mean().save(); h[:] = 0; saved = k
h = m.a.output; e = h + 1; h[:] = 0; saved = e
h = m.a.output; e = h[:, 1:]; h[:, 2] = 7.0; saved = e
h = m.a.output; e = h.T; e[0] = 3.0; saved = h
own = []; own.append(m.a.output); own.append(m.b.output); saved = own
t = torch.ones(4); m.a.output *= t; t[0] = 9.0; m.b.output *= t; saved = t
t = d.clone(); t += 1; m.a.output += t; t *= 2; m.c.output += t
d2 = d; d2 = d2 + 1; m.a.output += d2
h = m.a.output; msk = h > 0; h[msk] = 0.5; saved = msk.sum()
h = m.a.output; m.a.output = torch.where(h > 0, h, d)
h = m.a.output; m.a.output = h.masked_fill(h < 0, -1.0)
h = m.a.output; i = h.argmax(-1); saved = i; m.a.output = torch.nn.functional.one_hot(i, 4).float()
h = m.a.output; v, i = h.topk(2, -1); z = torch.zeros_like(h); z.scatter_(1, i, v); m.a.output = z
h = m.a.output; q = h.view(3, 2, 2); q[:, 0] = 0; saved = q
h = m.a.output; h.data[:] = 1.0; saved = h
h = m.a.output; h.fill_(d[1]); saved = h
h = m.a.output; h.copy_(d.expand(3, 4))
h = m.a.output; h.sub_(h.mean(-1, keepdim=True)).div_(h.std(-1, keepdim=True) + 1e-05)
x = m.a.input; m.a.input = x * 2; saved = x
x = m.a.input; x += 1; saved = x
m.c.inputs = ((m.c.input * 2,), {})
o = m.output; o['out'][:] = 0; saved = o['hid'][0]
o = m.output; m.output = {**o, 'out': o['out'] + 1}
o = m.output['hid']; saved = o
p = probe(m.a.output); saved = p.sum(); m.b.output += p
with torch.no_grad(): n = m.a.output.norm()
h = m.a.output; f = lambda u: u * alpha; m.a.output = f(h)
h = m.a.output; m.a.output = h + alpha * d; m.c.output = m.c.output - alpha
cfg['w'] = m.a.output.sum(); saved = cfg['w']
h = m.a.output; m.a.output = h + cfg0['k']
for i in range(2): m.a.output = m.a.output * (i + 1)
saved = [t.mean() for t in (m.a.output, m.b.output)]
h = m.a.output; g = h; g += 1; saved = (h, g)
h = m.a.output; saved = h.shape[0] * h.sum()
h = m.a.output; e = torch.einsum('bi,ij->bj', h, W); m.a.output = e
h = m.a.output; m.a.output = h @ W.T; saved = h @ d
h = m.a.output; l = list(h); saved = l[0] + l[1]
h = m.a.output; u = h.unbind(1); saved = torch.stack(u[::-1], 1)
h = m.a.output; h[0], h[1] = (h[1].clone(), h[0].clone())
h = m.a.output; h[..., None][:, 0] = 2.0
h = m.a.output; w = W; w = w * 2; w[0] = 0; m.a.output = h @ w; w[1] = 0; saved = w
h = m.a.output; m.b.skip(h * 2)
h = m.a.output; m.b.skip(h); h += 1
m.b.skip(d.expand(3, 4))
h = m.a.output; m.a.output = h.clone(); z = m.c.output; z *= 0
b = m.b.output; m.b.output = b; b *= 2
b = m.b.output; m.b.output = b * 1; b *= 2
h = m.a.output; r = h.detach(); r += 1; saved = h
h = m.a.output.detach().requires_grad_(); saved = h.sum()
h = m.a.output; acc = 0; acc = acc + h.sum(); acc = acc + m.b.output.sum(); saved = acc
h = m.a.output; saved = torch.nn.functional.layer_norm(h, (4,), d, d)
h = m.a.output; saved = h.sort(descending=True)[0]; h.clamp_(min=0)
h = m.a.output; saved = h.to(torch.float64).to(torch.float32); h.zero_()
h = m.a.output; saved = h.expand(2, 3, 4); h += 1
h = m.a.output; t = torch.tensor([1.0, 2.0, 3.0, 4.0]); t2 = t + h.mean(0); t += 5; saved = t2 + t
h = m.a.output; t = d.view(2, 2); t = t * 2; t.t()[0] = 0; saved = h + t.reshape(-1)
"""

#: Blocks that edit tensors of their own with values of the model, which a program cannot have; a trace that runs here can.
REFUSED = """
h = m.a.output; z = torch.arange(4.0); z[h[0].argmax()] = 0; saved = z
"""

NAMES = ("torch", "d", "W", "alpha", "probe", "cfg", "cfg0")
AOT = {"backend": "aot_eager"}


class Net(torch.nn.Module):
    """Goes on with what its first module returns, and returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        a = self.a(x)
        c = self.c(self.b(a))
        return {"out": self.d(a + c), "hid": (a, c)}


def things() -> dict[str, Any]:
    """Return what the blocks find outside."""
    probe = torch.nn.Linear(4, 4)
    with torch.no_grad():
        probe.weight.fill_(0.1)
        probe.bias.zero_()
    matrix = torch.arange(16.0).view(4, 4) / 10
    return {"torch": torch, "d": torch.arange(1.0, 5.0), "W": matrix, "alpha": 1.5, "probe": probe, "cfg": {}, "cfg0": {"k": torch.ones(4)}}


def function_of(line: str, header: str, before: str, after: str) -> Callable[..., Any]:
    body = [line] if line.startswith(("for ", "with ")) else line.split("; ")
    source = [f"def run(m, x, save, options, {', '.join(NAMES)}):", "    saved = None", f"    with {header}:"]
    source += [f"        {part}" for part in [*body, before]] + [f"    return {after}", ""]
    text, filename = "\n".join(source), f"<pattern {len(linecache.cache)}>"
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    made: dict[str, Any] = {}
    exec(compile(text, filename, "exec"), made)
    function: Callable[..., Any] = made["run"]
    return function


def traced(line: str, model: NNsight, x: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    """Return the output, what the block saves, and the tensors from outside, after a trace."""
    before = 'saved = save(saved) if saved is not None else None; out = m.output["out"].save()'
    outside = things()
    found = function_of(line, "m.trace(x, **options)", before, "(out, saved)")(model, x.clone(), save, options, **outside)
    leaves = torch.utils._pytree.tree_leaves([*found, outside["d"], outside["W"]])
    return [torch.as_tensor(leaf).detach().float() for leaf in leaves if leaf is not None]


@pytest.mark.parametrize("line", BLOCKS.strip().splitlines())
def test_a_block_does_the_same_in_each_form(line: str) -> None:
    torch.manual_seed(0)
    net, xs = Net(), [torch.randn(3, 4) for _ in range(2)]
    expected = traced(line, NNsight(net), xs[0])
    for model, options in ((NNsight(net, compile=AOT), {}), (NNsight(net), {"program": True}), (NNsight(net), {"remote": "local"})):
        torch.testing.assert_close(traced(line, model, xs[0], **options), expected, rtol=1e-4, atol=1e-4)
    if "cfg[" in line:  # an edit that fills a dict is no program
        return
    edit = function_of(line, "m.edit() as m", "pass", "m")
    eager, compiled, baked = (edit(NNsight(net, compile=AOT), xs[0], save, {}, **things()) for _ in range(3))
    compiled.compile(**AOT)
    module = baked.bake(xs[0])
    for x in xs:
        wanted = eager(x.clone())["out"]
        for found in (compiled(x.clone())["out"], module(x.clone())["out"]):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("line", REFUSED.strip().splitlines())
def test_a_block_that_is_no_program_is_refused(line: str) -> None:
    net, x = Net(), torch.randn(3, 4)
    torch.testing.assert_close(traced(line, NNsight(net, compile=AOT), x), traced(line, NNsight(net), x))
    with pytest.raises(NotExpressibleError, match=r"<pattern \d+>:\d+: "):
        traced(line, NNsight(net), x, program=True)
