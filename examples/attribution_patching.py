# %% [markdown]
# # Attribution patching
#
# One backward pass estimates the effect of all activation patches: the estimate for a patch is (patched value - value) x gradient
# (Nanda 2023; Syed et al. 2023, https://arxiv.org/abs/2310.10348). On a compiled model, forward and backward pass are one graph each.

# %%
import torch

import nnsight

model = nnsight.demo_model()
model.compile()
clean, corrupt = "The Eiffel Tower is in the city of", "The Colosseum is in the city of"
paris, rome = (model.tokenizer.encode(name)[0] for name in (" Paris", " Rome"))

with model.trace(clean):
    wanted = nnsight.save([block.mlp.output[:, -1].detach() for block in model.transformer.h])

with model.trace(corrupt) as tracer:
    outputs = [block.mlp.output for block in model.transformer.h]
    logits = model.lm_head.output[:, -1]
    metric = (logits[:, paris] - logits[:, rome]).sum()
    with metric.backward():
        gradients = [output.grad[:, -1] for output in reversed(outputs)]
        estimates = nnsight.save(
            [
                ((new - old[:, -1]) * gradient).sum().detach()
                for new, old, gradient in zip(wanted, outputs, reversed(gradients), strict=True)
            ]
        )

print(tracer.report)

# %% [markdown]
# For comparison, the exact effects: activation patching, one MLP at a time.

# %%
with torch.no_grad():
    with model.trace(corrupt):
        logits = model.lm_head.output[:, -1]
        without = (logits[:, paris] - logits[:, rome]).sum().save()
    exact = []
    for layer, state in enumerate(wanted):
        with model.trace(corrupt):
            model.transformer.h[layer].mlp.output[:, -1] = state
            logits = model.lm_head.output[:, -1]
            found = (logits[:, paris] - logits[:, rome]).sum().save()
        exact.append(float(found - without))

for layer, (estimate, patched) in enumerate(zip(estimates, exact, strict=True)):
    print(f"MLP {layer}: estimated {float(estimate):+7.2f}, patched {patched:+7.2f}")

assert not tracer.report.breaks
assert torch.corrcoef(torch.tensor([[float(estimate) for estimate in estimates], exact]))[0, 1] > 0.5
