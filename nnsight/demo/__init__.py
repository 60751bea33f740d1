"""A tiny language model that ships with the package, trained so that interventions on it show.

It has the GPT-2 architecture (6 layers, width 128, about 1.3 million parameters) and was trained by `tools/demo/train.py` on generated
text. Four classic experiments work offline, in milliseconds on a CPU:

- *Facts.* "The Eiffel Tower is in the city of" continues with " Paris".
- *Logit lens.* Layer by layer, the answer rises to the top of the vocabulary (nostalgebraist, 2020).
- *Activation patching.* The hidden state of "The Colosseum is in the city of", put into the run of another prompt, turns the answer into
  " Rome": at the subject's last token in the first three layers, at the prompt's last token in the last three (Meng et al., 2022,
  https://arxiv.org/abs/2202.05262).
- *Steering.* Opinions such as "The movie was" continue positively or negatively with equal chance; the difference of mean hidden states,
  added while generating, decides which (Turner et al., 2023, https://arxiv.org/abs/2308.10248).

The accuracies on prompts that training never showed are in `train.log`, next to the weights.

    from transformers import AutoModelForCausalLM, AutoTokenizer
    from nnsight import demo

    model = AutoModelForCausalLM.from_pretrained(demo.path())
    tokenizer = AutoTokenizer.from_pretrained(demo.path())
"""

from __future__ import annotations

import os

NAME = "nnsight/demo"

# Where interventions work best, as `train.log` shows: indices into `model.transformer.h`, whose block outputs
# are replaced at the subject's last token, replaced at the prompt's last token, or shifted.
PATCH_SUBJECT_LAYER = 1
PATCH_LAST_LAYER = 3
STEERING_LAYER = 4
STEERING_COEFFICIENT = 1.0


def path() -> str:
    """The folder with the weights, the configuration and the tokenizer, for `from_pretrained`."""
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), "weights")
