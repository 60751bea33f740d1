# %% [markdown]
# # Logit lens
#
# Which token would the model predict if it stopped after a layer? The logit lens applies the final norm and the unembedding to the hidden
# state of every layer (nostalgebraist 2020). The block calls these modules of the model, and one trace computes all layers.

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
# The table shows the likeliest token after each layer, and the probability of the final answer after this layer.

# %%
answer = int(layers[-1].argmax())
table = [(number, model.tokenizer.decode([int(layer.argmax())]), float(layer[answer])) for number, layer in enumerate(layers)]
for number, token, probability in table:
    print(f"layer {number}: {token!r:12} p({model.tokenizer.decode([answer])!r}) = {probability:.3f}")

assert table[-1][1] == " Paris"
assert table[-1][2] > table[0][2]
