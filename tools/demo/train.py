"""Train the demo model and measure what it can do: `python -m tools.demo.train`.

Three stages, all seeded:

1. a byte-level BPE tokenizer, trained on a sample of the corpus, in which every city is one token;
2. a GPT-2 of 6 layers and width 128, trained with AdamW and a cosine schedule on packed documents. Each row
   starts with the first token of a document, so the model knows prompts at position 0. Until the last tenth of
   the steps, positions after a landmark can attend only to its last token. The model therefore has to collect
   the fact at this token, as large models do (Geva et al., 2023, https://arxiv.org/abs/2304.14767), and
   activation patching at this token has a clear effect. The last tenth of the steps uses the plain causal mask,
   like all later uses of the model;
3. the evaluation in `tools/demo/evaluate.py`, on the weights as stored (float16) and loaded (float32).

Training takes some minutes on one CPU thread. The matrix products run in bfloat16, so the weights of two
machines agree in quality but not bit by bit. `train.log` next to the weights records the run that made them.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import platform
import time
from itertools import islice

import torch
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from tqdm.auto import tqdm
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from nnsight import demo

from . import corpus
from .evaluate import evaluate
from .prompts import CITIES

logger = logging.getLogger("nnsight.demo.train")

END_OF_TEXT = "<|endoftext|>"
VOCAB_SIZE = 1024
CONTEXT = 128
TOKENIZER_DOCUMENTS = 20_000


def train_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE with `VOCAB_SIZE` tokens. One special token begins, ends and pads texts.

    Raises:
        ValueError: if the first word of a city or a country is not a single token.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(islice(corpus.documents(seed), TOKENIZER_DOCUMENTS), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        padding_side="left",
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    for word in [*CITIES, *(city.country for city in CITIES.values())]:
        first = " " + word.split()[0]
        if len(tokenizer.encode(first)) != 1:
            raise ValueError(f"{first!r} is not one token: raise VOCAB_SIZE or mention it more often")
    return tokenizer


def pack(tokenizer: PreTrainedTokenizerFast, rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Pack documents into rows. The end token follows each document, and the last document of a row is truncated.

    Returns:
        Token ids [rows, CONTEXT], and for each token the last position that may attend to it
        [rows, CONTEXT]: the end of the landmark for all tokens of a landmark except the last, else no limit.
    """
    stream = corpus.documents(seed)
    packed = torch.empty(rows, CONTEXT, dtype=torch.long)
    visible_until = torch.full((rows, CONTEXT), CONTEXT)
    filled = 0
    row: list[int] = []
    limits: list[int] = []
    with tqdm(total=rows, desc="corpus", leave=False) as progress:
        while filled < rows:
            texts = list(islice(stream, 1000))
            encoded = tokenizer(texts)
            for index, text in enumerate(texts):
                start = len(row)
                row += [*encoded[index].ids, tokenizer.eos_token_id]
                limits += [CONTEXT] * (len(row) - start)
                for first_char, end_char in corpus.landmark_spans(text):
                    first = start + encoded.char_to_token(index, first_char)
                    last = start + encoded.char_to_token(index, end_char - 1)
                    limits[first:last] = [last] * (last - first)
                if len(row) >= CONTEXT and filled < rows:
                    packed[filled] = torch.tensor(row[:CONTEXT])
                    visible_until[filled] = torch.tensor(limits[:CONTEXT])
                    filled += 1
                    row, limits = [], []
            progress.update(filled - progress.n)
    return packed, visible_until


def bottleneck_mask(visible_until: Tensor) -> Tensor:
    """Causal attention mask [batch, 1, query, key] in which key `k` is visible up to position `visible_until[:, k]`."""
    query = torch.arange(visible_until.shape[1])[:, None]
    return ((query >= query.T) & (query <= visible_until[:, None, :]))[:, None]


def build_model(tokenizer: PreTrainedTokenizerFast) -> GPT2LMHeadModel:
    """The untrained model, float32, without dropout, with tied embeddings."""
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=CONTEXT,
        n_embd=128,
        n_layer=6,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return GPT2LMHeadModel(config)


def train_model(
    model: GPT2LMHeadModel, ids: Tensor, visible_until: Tensor, batch_size: int, peak_rate: float
) -> None:
    """One pass over the rows of `ids`, in order: linear warm-up, then cosine decay to 1 % of the peak."""
    steps = len(ids) // batch_size
    plain_from = steps - steps // 10
    warm_up = max(1, steps // 20)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=peak_rate, betas=(0.9, 0.98))
    model.train()
    average = 0.0
    with tqdm(range(steps), desc="train", leave=False) as progress:
        for step in progress:
            done = (step - warm_up) / max(1, steps - warm_up)
            cosine = 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done))
            rate = (step + 1) / warm_up if step < warm_up else cosine
            for group in optimizer.param_groups:
                group["lr"] = peak_rate * rate
            rows = slice(step * batch_size, (step + 1) * batch_size)
            batch = ids[rows]
            mask = bottleneck_mask(visible_until[rows]) if step < plain_from else None
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(input_ids=batch, attention_mask=mask, use_cache=False).logits[:, :-1]
            loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            average = loss.item() if step == 0 else 0.98 * average + 0.02 * loss.item()
            progress.set_postfix(loss=f"{average:.3f}")
            if (step + 1) % max(1, steps // 10) == 0:
                logger.info("step %5d of %d  loss %.3f nats per token", step + 1, steps, average)
    model.eval()


def save(model: GPT2LMHeadModel, tokenizer: PreTrainedTokenizerFast, folder: str) -> None:
    """Write tokenizer, configuration and float16 weights. The configuration makes them load as float32."""
    os.makedirs(folder, exist_ok=True)
    tokenizer.save_pretrained(folder)
    model.half().save_pretrained(folder)
    model.float()
    os.chmod(os.path.join(folder, "model.safetensors"), 0o644)
    _set_in_json(os.path.join(folder, "config.json"), "dtype", "float32")
    # The name that all versions of transformers know.
    _set_in_json(os.path.join(folder, "tokenizer_config.json"), "tokenizer_class", "PreTrainedTokenizerFast")


def _set_in_json(path: str, key: str, value: str) -> None:
    with open(path, encoding="utf-8") as file:
        content = json.load(file)
    content[key] = value
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=2)
        file.write("\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.demo.train",
        description="Train the demo model (a 1.3 million parameter GPT-2 that knows where landmarks are "
                    "and has opinions) on its generated corpus, store it, and measure facts, logit lens, "
                    "activation patching and steering on held-out prompts. Takes minutes on one CPU thread; "
                    "the log goes to the terminal and to train.log next to the weights.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--out", default=demo.path(), help="folder for weights, tokenizer and train.log")
    parser.add_argument("--steps", type=int, default=2000, help="optimizer steps")
    parser.add_argument("--batch-size", type=int, default=16, help=f"rows of {CONTEXT} tokens per step")
    parser.add_argument("--rate", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0, help="seed of the corpus and of the initial weights")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--evaluate", action="store_true",
                        help="only measure the weights in --out; train nothing and leave train.log alone")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    handlers: list[logging.Handler] = [logging.StreamHandler()]
    if not arguments.evaluate:
        os.makedirs(arguments.out, exist_ok=True)
        log_path = os.path.join(arguments.out, "train.log")
        handlers.append(logging.FileHandler(log_path, mode="w", encoding="utf-8"))
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=handlers)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    if not arguments.evaluate:
        started = time.perf_counter()
        logger.info("python %s, torch %s, transformers %s, %s, %d thread(s), seed %d",
                    platform.python_version(), torch.__version__, transformers.__version__,
                    platform.machine(), arguments.threads, arguments.seed)
        torch.manual_seed(arguments.seed)
        tokenizer = train_tokenizer(arguments.seed)
        ids, visible_until = pack(tokenizer, arguments.steps * arguments.batch_size, arguments.seed + 1)
        model = build_model(tokenizer)
        logger.info("%d parameters, %d tokens of text", model.num_parameters(), ids.numel())
        train_model(model, ids, visible_until, arguments.batch_size, arguments.rate)
        save(model, tokenizer, arguments.out)
        logger.info("trained in %.0f s", time.perf_counter() - started)
    evaluate(arguments.out)


if __name__ == "__main__":
    main()
