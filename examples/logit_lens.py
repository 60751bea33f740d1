# %% [markdown]
# # Logit lens
#
# What would the model say if it stopped after each layer? The final norm and the unembedding are applied to the hidden state of every layer
# (nostalgebraist 2020). One trace computes all layers; modules of the model are called inside the block.

# %%
import torch

import nnsight

model = nnsight.demo_model()
model.compile()
prompt = "The Eiffel Tower is in the city of"

with torch.no_grad(), model.trace(prompt):
    layers = [model.lm_head(model.transformer.ln_f(block.output))[0, -1].softmax(-1) for block in model.transformer.h]
    layers = nnsight.save(layers)

# %% [markdown]
# The likeliest token after each layer, and how likely the answer of the whole model is there.

# %%
answer = int(layers[-1].argmax())
table = [(number, model.tokenizer.decode([int(layer.argmax())]), float(layer[answer])) for number, layer in enumerate(layers)]
for number, token, probability in table:
    print(f"layer {number}: {token!r:12} p({model.tokenizer.decode([answer])!r}) = {probability:.3f}")

assert table[-1][1] == " Paris"
assert table[-1][2] > table[0][2]
