"""What a block may do at an occurrence, as templates.

Most are one line; those of several lines are separated by empty ones. In a template ``T`` stands for a tensor in reach, ``V`` for
another one, ``P`` for a part of one, and ``N`` for a new name; all but ``P`` have the shape ``[batch, length, WIDTH]``. ``w`` is a
:class:`~tests.fuzz.world.World`.
"""

#: What can be kept and noted.
READS = """
w.kept.append(T)
w.kept.append(T.clone())
w.kept.append(T[:, :])
w.kept.append(T[:, -1].T)
w.table["last"] = T * 2.0
w.table.setdefault("all", []).append((T, {"half": T / 2}))
w.box.value = T
w.log.append((tuple(T.shape), T.dtype, T.dim(), len(T)))
w.log.append((T.requires_grad, T.is_contiguous(), isinstance(T, torch.Tensor)))
w.total += T.detach().mean((0, 1))
w.counts += (T.detach() > 0).sum().long()
w.kept.append(T.argmax(-1))
w.kept.append(T.detach().sum())
N = T.clone().save()
""".strip().splitlines()

#: Expressions of the same shape.
EXPRESSIONS = """
T * 2.0
T
T.clone()
T + 1
T * w.number
T + w.vector
V
T - V
T @ w.matrix
w.number - T
T + w.total
T * w.scalar
torch.softmax(T, dim=-1)
torch.where(T > 0, T, w.vector * w.number)
torch.cat([T[..., 2:], T[..., :2]], dim=-1)
torch.zeros_like(T).scatter(-1, T.topk(2, dim=-1).indices, 1.0)
T.flip(1)
T.detach()
w.probe(T)
T.mean(1, keepdim=True) + T
T.cumsum(1)
T.transpose(1, 2).contiguous().transpose(1, 2)
torch.einsum("bld,de->ble", T, w.matrix)
T.double().float()
T.sort(-1).values
torch.stack(list(T.unbind(1)), 1)
T[:, torch.arange(T.shape[1] - 1, -1, -1)]
T / T.shape[1]
T - T[:, : T.shape[1] // 2].sum(1, keepdim=True)
T.expand_as(V)
T.view(T.shape[0], -1).view_as(T)
T - (T @ (w.vector / 2.0))[..., None] * w.vector
torch.lerp(T, V, 0.25)
T.masked_fill(T > 1.0, 0.0)
T.to(torch.float32)
T[:]
torch.nn.functional.layer_norm(T, (T.shape[-1],), w.vector)
(T > V).float()
T.pow(2).clamp(max=3.0)
T * torch.ones(T.shape[0], 1, 1)
torch.maximum(T, w.vector)
sum([T, V, w.vector])
T.index_select(2, w.counts.new_tensor([3, 2, 1, 0]))
torch.baddbmm(T, T, w.matrix.expand(T.shape[0], -1, -1))
functools.partial(torch.add, T, alpha=2)(V)
functools.partial(torch.nn.functional.softplus, beta=2.0)(T)
functools.partial(torch.Tensor.mul, T)(w.vector)
functools.reduce(torch.add, [T, V, w.vector])
(lambda x, by=w.vector: x - by)(T)
""".strip().splitlines()

#: Expressions of a part that shares its memory with the tensor.
PARTS = """
T[:, 1:]
T[:, -1]
T[0]
T[..., :2]
T.transpose(0, 1)
T.mT[:, 1]
T.chunk(2, dim=-1)[1]
T.reshape(-1, T.shape[-1])
T.detach()[:, 0]
T.unbind(0)[0]
P[..., :1]
P.unsqueeze(0)
P[-1]
T.view(-1)
T.diagonal(dim1=1, dim2=2)
""".strip().splitlines()

#: Edits in place.
EDITS = """
T[:, -1] = 0
T += w.vector
T *= w.number
T[:, 1:] += 1.0
T[..., 0] = w.number
T[:] = V * 0.5
T[:] = w.vector
T.mul_(2).clamp_(-5, 5)
T[T > 0.5] = 0.25
T[0] += w.vector
T[:, 1:].transpose(1, 2)[:, 0] += w.number
T.add_(V, alpha=2)
T.copy_(V.flip(-1))
T.masked_fill_(T < 0, 0.0)
T.zero_()
T[:, [0, -1]] = 1.0
T -= V.mean()
T[:, ::2, 1:3] /= 2
T[0, 0, 0] = w.scalar
T.select(1, 0).fill_(3.0)
T[:, 0], T[:, -1] = T[:, -1].clone(), T[:, 0].clone()
P += w.number
P.mul_(0.5)
P[...] = 0.75
P -= P.mean()
w.vector *= 1.5
w.vector[0] = 1.0
w.vector[1:].add_(1.0)
w.total[:] = T.detach()[0, 0]
w.counts += 1
w.matrix.T[0] = w.vector
if w.kept and w.kept[-1].is_floating_point(): w.kept[-1].add_(1.0)
with torch.no_grad(): T.mul_(w.number)
functools.partial(torch.Tensor.add_, T, alpha=2)(w.vector)
T[..., [2, 0]] += w.number
T[:, [0, -1]] *= V[:, [0, -1]]
w.kept.append(T[..., [2, 0]]); T.mul_(2.0)
w.kept.append(T.double()); T.add_(1.0)
w.kept.append(T.transpose(1, 2).reshape(-1)); T.mul_(0.5)
w.kept.append(T.split([1, 3], -1)[0]); T.split([1, 3], -1)[1].mul_(0.5)
""".strip().splitlines()

#: Statements that need a value, so that a compiled graph is cut.
CUTS = """
w.log.append(round(T.detach().sum().item(), 2))
N = T + 1.0 if T.sum() > 0.01 else T - 1.0
if (T > 0).all(): w.log.append("positive")
w.log.append(int(T.detach()[0, 0].argmax()))
N = T * float(T.detach().mean() > 0.01)
w.log.append(T[T > 0].numel())
w.log.append(torch.equal(T, V))
w.log.append((T.detach() > 0).tolist())
w.log.append(bool(w.total.sum() > 0.01) if T is V else T.detach().numpy().shape)
for _ in range(int((T > 0).sum()) % 3): T.add_(1.0)
while T.detach().abs().sum() > 40.0: T.mul_(0.5); w.log.append("halved")
if T.detach().norm() > 2.0: w.log.append("long"); T.div_(2.0)
print("mean", round(T.detach().mean().item(), 2)); w.log.append("printed")
print("shape", tuple(T.shape)); w.log.append(f"{T.detach()[0, 0, 0]:.2f}")
w.log.append(round(torch.rand(()).item(), 4)); T += torch.rand_like(T); w.log.append(bool(T.detach().sum() > 0.01))
assert T.detach().abs().sum() >= 0.0, "never"
w.log.append(len(T.detach()[0, :, 0].nonzero())); T += 1.0
N = T * 2.0 if torch.equal(T[:, 0], T[:, -1]) else T / 2.0
with torch.no_grad(): w.log.append((T * 2.0).sum().item() > 0.01)
with contextlib.suppress(IndexError): w.log.append("in"); w.kept.append(w.vector[T.detach()[0, 0].argmax() + 2]); w.log.append("out")
with w.dropping(): T.add_(1.0); w.kept.append(w.matrix[:, T.detach()[0].argmax(-1) + 1]); w.log.append("out")
with w.dropping(), torch.no_grad(): w.log.append("in"); w.kept.append(torch.linalg.inv(T.detach()[0, :1].T @ T.detach()[0, :1] * 0.0))
w.kept.append(torch.func.grad(lambda x: (x**2).sum() if x.sum() > 0.01 else x.sum())(T.detach()))
""".strip().splitlines()

#: Errors that are caught whatever the values are, so that nothing is cut.
TRIES = """
try:
    N = T + torch.ones(9)
except RuntimeError as error:
    w.log.append(type(error).__name__)
    N = T * 0.5

try:
    T.add_(1.0)
    raise KeyError("mine")
except (KeyError, ValueError) as error:
    w.log.append(str(error))
    T.mul_(0.5)
finally:
    w.log.append("finally")

try:
    N = T @ w.matrix
except RuntimeError:
    N = T.clone()
else:
    w.log.append("fits")

try:
    try:
        N = T * 1.0
        N[:, 99] = 1.0
    finally:
        w.log.append("inner")
        T += 1.0
except IndexError as error:
    w.log.append(type(error).__name__)

try:
    w.kept.append(undefined_name)
except NameError:
    w.kept.append(T)

for _ in range(3):
    try:
        if _ == 1: continue
        T.sub_(0.5)
        if _ == 2: raise StopIteration("third")
    except StopIteration as error:
        w.log.append(str(error))
    finally:
        w.log.append(_)

try:
    try:
        torch.cat([T, torch.ones(2)])
    except RuntimeError as error:
        raise LookupError("none") from error
except LookupError as error:
    w.log.append((str(error), type(error.__cause__).__name__))

try:
    T.view(7, 7, 7)
except Exception:
    w.log.append("no such view")
N = T - 1.0

try:
    N = T.no_such_method()
except AttributeError:
    N = -T

try:
    T[:, 0] = torch.ones(7)
except RuntimeError as error:
    w.log.append(type(error).__name__)
    T[:, 0] = 7.0
""".strip().split("\n\n")

#: Errors because of values that are caught.
VALUE_TRIES = """
try:
    w.kept.append(w.vector[T.detach()[0, 0].argmax() + 2])
    w.log.append("found")
except IndexError:
    w.log.append("not found")
    T.add_(1.0)

try:
    if T.detach().sum() > 0.01: raise ValueError("positive")
    T.mul_(0.5)
except ValueError as error:
    w.log.append(str(error))
    T.mul_(2.0)
finally:
    w.kept.append(T.detach().clone())

for _ in range(2):
    try:
        w.kept.append(w.matrix[:, T.detach()[0].argmax(-1) + 1])
        w.log.append("in")
    except IndexError:
        T.sub_(1.0)
        continue
    w.log.append(_)

try:
    N = torch.linalg.inv(T.detach()[:1, :1].mT @ T.detach()[:1, :1] * 0.0)
    N = T * 2.0
except torch.linalg.LinAlgError:
    N = T * 3.0

try:
    w.log.append(int(T.detach().argmax()))
    assert T.detach().abs().sum() < 0.0
except AssertionError:
    w.log.append("never")

try:
    N = T.bitwise_not()
except NotImplementedError:
    N = T + 0.5
""".strip().split("\n\n")

#: What other statements can stand in; ``BODY`` are their lines, and they run at least once.
AROUND = """
try:
    BODY
finally:
    w.log.append("finally")

N = 0
while N < 2:
    BODY
    N += 1

N = 3
while N:
    N -= 1
    if N == 1: continue
    BODY
else:
    w.log.append("over")

N = 0
while True:
    N += 1
    BODY
    if N == 2: break

for N in range(2):
    try:
        BODY
    finally:
        w.log.append(N)
""".strip().split("\n\n")

#: The same, where a call that may fail because of values needs them.
AROUND_TRIES = """
try:
    BODY
    raise KeyError("mine")
except KeyError as error:
    w.log.append(str(error))

try:
    BODY
except (RuntimeError, IndexError):
    w.log.append("failed")
else:
    w.log.append("passed")
finally:
    w.log.append("finally")

for N in range(2):
    try:
        BODY
        raise KeyError("mine")
    finally:
        break
""".strip().split("\n\n")

#: What becomes of a mistake.
AROUND_MISTAKES = """
BODY

try:
    BODY
except Exception as error:
    w.log.append(type(error).__name__)

try:
    BODY
finally:
    w.log.append("finally")

try:
    BODY
except ZeroDivisionError:
    w.log.append("divided")
""".strip().split("\n\n")

#: What a block that can be replayed for other rounds does not have: effects outside, and numbers that differ between rounds.
_NOT_PLAIN = ("w.kept", "w.number", "w.probe", "with ", "list(")

#: Edits in such a block.
PLAIN_EDITS = [edit for edit in EDITS if not edit.startswith("w.") and not any(word in edit for word in _NOT_PLAIN)]

#: What statements of such a block can stand in.
PLAIN_AROUND = [
    *(around for around in AROUND if "w.log" not in around),
    "try:\n    BODY\nfinally:\n    N = 0",
    "N = 0\nwhile True:\n    BODY\n    if N: break\n    N = 1",
]

#: Expressions in such a block.
PLAIN_EXPRESSIONS = [found for found in EXPRESSIONS if not any(word in found for word in _NOT_PLAIN)]

#: Mistakes.
MISTAKES = """
T + torch.ones(9)
T @ torch.ones(9, 9)
T[:, 99]
T.view(7, 7, 7)
raise KeyError("mine")
AT.no_such_name
model.no_such_module
EARLY
torch.cat([T, torch.ones(2)])
T.no_such_method()
1 / 0
w.kept.append(undefined_name)
assert T is None
""".strip().splitlines()
