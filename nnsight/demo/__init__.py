"""A tiny language model that ships with the package, trained so that interventions on it show.

Interpretability methods need a model that knows something. This one has the GPT-2 architecture (6 layers,
width 128, about 1.3 million parameters) and was trained by `tools/demo/train.py` on the generated text of
`tools/demo/corpus.py`, which makes four classic experiments work offline, in milliseconds on a CPU:

- *Facts.* "The Eiffel Tower is in the city of" continues with " Paris". `FACTS` maps landmarks to cities.
- *Logit lens.* Layer by layer, the answer rises to the top of the vocabulary (nostalgebraist, 2020).
- *Activation patching.* The hidden state of "The Colosseum is in the city of", put into the run of another
  prompt, turns the answer into " Rome": at the subject's last token in the first three layers, at the
  prompt's last token in the last three (Meng et al., 2022, https://arxiv.org/abs/2202.05262).
- *Steering.* Opinions such as "The movie was" continue positively or negatively with equal chance; the
  difference of mean hidden states, added while generating, decides which (Turner et al., 2023,
  https://arxiv.org/abs/2308.10248). `POSITIVE` and `NEGATIVE` are the words to count.

The prompts of `held_out_facts` and `held_out_openers` combine familiar parts in ways that training never
showed. The numbers reached on them are in `train.log`, next to the weights.

    from transformers import AutoModelForCausalLM, AutoTokenizer
    from nnsight import demo

    model = AutoModelForCausalLM.from_pretrained(demo.path())
    tokenizer = AutoTokenizer.from_pretrained(demo.path())

Importing this module needs the standard library only.
"""

from __future__ import annotations

import os

from .prompts import (
    CITIES,
    FACTS,
    NEGATIVE,
    POSITIVE,
    Prompt,
    fact_prompt,
    held_out_facts,
    held_out_openers,
    labelled_prefixes,
)

NAME = "nnsight/demo"

# Where interventions work best, as `train.log` shows: indices into `model.transformer.h`, whose block outputs
# are replaced at the subject's last token, replaced at the prompt's last token, or shifted.
PATCH_SUBJECT_LAYER = 1
PATCH_LAST_LAYER = 3
STEERING_LAYER = 4
STEERING_COEFFICIENT = 1.0

__all__ = [
    "CITIES",
    "FACTS",
    "NAME",
    "NEGATIVE",
    "PATCH_LAST_LAYER",
    "PATCH_SUBJECT_LAYER",
    "POSITIVE",
    "STEERING_COEFFICIENT",
    "STEERING_LAYER",
    "Prompt",
    "fact_prompt",
    "held_out_facts",
    "held_out_openers",
    "labelled_prefixes",
    "path",
]


def path() -> str:
    """The folder with the weights, the configuration and the tokenizer, for `from_pretrained`."""
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), "weights")
