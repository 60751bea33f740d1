# %% [markdown]
# # Steering, from contrast prompts to a deployed vector
#
# Two kinds of prompts give a direction (Turner et al. 2023, https://arxiv.org/abs/2308.10248). A sweep finds the layer and the factor with
# the largest effect. Then the steered model is compiled, and baked into a plain module.

# %%
import tempfile
from pathlib import Path

import torch

import nnsight
from nnsight import steering

model = nnsight.demo_model()
french = ["The Eiffel Tower", "The Louvre", "The Pantheon", "The Opera", "The Bastille", "The Sorbonne"]
roman = ["The Colosseum", "The Forum", "The Vatican", "The Trevi fountain", "The Senate", "The Capitol"]
asked = [f"{place} is in the city of" for place in french], [f"{place} is in the city of" for place in roman]
vector = steering.contrast(model, *asked, progress=False)
print(vector, "best layer:", vector.best_layer)

# %%
paris = model.tokenizer.encode(" Paris")[0]


def metric(steered):
    """Return the log probability of " Paris" after two prompts whose answer is another city."""
    with torch.no_grad(), steered.trace(asked[1][:2]):
        found = steered.lm_head.output[:, -1].log_softmax(-1)[:, paris].save()
    return found


table = steering.sweep(model, vector, metric, layers=[2, 3, 4], scales=[1.0, 2.0, 4.0], progress=False)
print(table)
assert table.has_effect

# %% [markdown]
# The factor is a parameter of the compiled model, so another factor needs no compilation.

# %%
best = table.best
steered = vector.apply(model, best.scale, layers=best.layer)
steered.compile()
options = {"max_new_tokens": 3, "do_sample": False}
prompt = asked[1][0]
for scale in (0.0, best.scale):
    steered.params["scale"] = scale
    ids = steered.generate(prompt, **options)
    print(f"scale {scale:g}: {model.tokenizer.decode(ids[0])!r}")

# %% [markdown]
# The baked model is a plain `torch.nn.Module`. The vector is stored in a file that a vLLM server can also load.

# %%
baked = vector.apply(model, best.scale, layers=best.layer).bake()
inputs = model.tokenizer(prompt, return_tensors="pt")
assert torch.equal(baked.generate(**inputs, **options, pad_token_id=0), ids)
with tempfile.TemporaryDirectory() as folder:
    file = vector.save(Path(folder) / "paris.safetensors")
    assert steering.SteeringVector.load(file) == vector
