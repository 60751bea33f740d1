# %% [markdown]
# # Activation patching
#
# At which layers does the hidden state contain the fact? A hidden state of one prompt replaces that of another prompt, at one layer at a
# time. If this changes the answer, the state contains the fact (Meng et al. 2022, https://arxiv.org/abs/2202.05262).

# %%
import torch

import nnsight

model = nnsight.demo_model()
model.compile()
clean, corrupt = "The Eiffel Tower is in the city of", "The Colosseum is in the city of"
paris, rome = (model.tokenizer.encode(name)[0] for name in (" Paris", " Rome"))
last = -1


def difference(logits: torch.Tensor) -> torch.Tensor:
    """Return the logit difference of the clean and the corrupt answer, for each row of ``logits`` [batch, vocabulary]."""
    return logits[:, paris] - logits[:, rome]


# %% [markdown]
# One trace reads the hidden states of the clean prompt. Each later trace patches one layer of the other prompt. Another layer needs a new
# program, but equal layers are compiled once, and another tensor needs no compilation.

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
# 0 is the answer of the corrupt prompt, and 1 is the answer of the clean prompt.

# %%
for layer, share in enumerate(patched):
    print(f"layer {layer}: {share:+.2f} {'#' * round(40 * max(share, 0.0))}")

assert abs(patched[-1] - 1.0) < 1e-3  # after the last layer, only this state decides the answer
assert max(patched) > 0.9 > patched[0]
