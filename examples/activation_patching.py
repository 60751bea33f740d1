# %% [markdown]
# # Activation patching
#
# Where does the model keep the fact? The hidden state of one prompt is put into the run of another, at one layer at a time. Where that
# changes the answer, the state carries it (Meng et al. 2022, https://arxiv.org/abs/2202.05262).

# %%
import torch

import nnsight

model = nnsight.demo_model()
model.compile()
clean, corrupt = "The Eiffel Tower is in the city of", "The Colosseum is in the city of"
paris, rome = (model.tokenizer.encode(name)[0] for name in (" Paris", " Rome"))
last = -1


def difference(logits: torch.Tensor) -> torch.Tensor:
    """Return how much likelier the answer of the clean prompt is, for each row."""
    return logits[:, paris] - logits[:, rome]


# %% [markdown]
# One trace reads the hidden states of the clean prompt. Each later one patches one layer of the other prompt: the same block with another
# layer and another tensor, of which the compiled model reuses what it has.

# %%
with torch.no_grad():
    with model.trace(clean):
        states = nnsight.save([block.output[:, last] for block in model.transformer.h])
        due = difference(model.lm_head.output[:, last]).save()
    with model.trace(corrupt):
        without = difference(model.lm_head.output[:, last]).save()
    patched = []
    for layer, state in enumerate(states):
        with model.trace(corrupt):
            model.transformer.h[layer].output[:, last] = state
            found = difference(model.lm_head.output[:, last]).save()
        patched.append(float((found - without) / (due - without)))

# %% [markdown]
# 0 is the answer of the corrupt prompt, 1 that of the clean one.

# %%
for layer, share in enumerate(patched):
    print(f"layer {layer}: {share:+.2f} {'#' * round(40 * max(share, 0.0))}")

assert abs(patched[-1] - 1.0) < 1e-3  # nothing but the last state decides behind the last layer
assert max(patched) > 0.9 > patched[0]
