"""Random calls of scripts/soak.py: functions of a `Draw` that return results and gradients."""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

import torch
from mask_cases import MASKS
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as torch_attention

import fused_attn
from fused_attn import masks

LENGTHS = [5, 16, 33, 64, 100, 257]
Call = tuple[str, int]  # kind and seed
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


class Draw(random.Random):
    """Random choices and tensors of one call."""

    def tensor(self, *shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> Tensor:
        generator = torch.Generator().manual_seed(self.getrandbits(60))
        return torch.randn(shape, generator=generator).to(dtype).requires_grad_(grad)


def with_gradients(out: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    grads = inputs if out.requires_grad else []
    return [out, *(torch.autograd.grad(out.square().sum(), grads) if grads else ())]


def attention(r: Draw, backend: str | None = None) -> list[Tensor]:
    (rows, keys), dim, grad = r.choices(LENGTHS, k=2), r.choice([8, 64, 80]), r.random() < 0.5
    sizes, dtype = ((2, n, 4, dim) for n in (rows, keys, keys)), r.choice(DTYPES)
    qkv = [r.tensor(*size, dtype=dtype, grad=grad) for size in sizes]
    mask = MASKS[r.choice([*MASKS])](2, 4, rows, keys)
    with fused_attn.stats() if r.random() < 0.2 else contextlib.nullcontext():
        out = fused_attn.scaled_dot_product_attention(
            *(t.transpose(1, 2) for t in qkv), mask, r.choice([0.0, 0.1]), seed=7, backend=backend
        )
    return with_gradients(out, qkv)


def eager(r: Draw) -> list[Tensor]:
    return attention(r, "eager")


SHARED = [masks.causal() & masks.dense(Draw(n).tensor(99, 99) > 0) for n in range(4)]


def shared_mask(r: Draw) -> list[Tensor]:
    """Use a Mask that other threads use, sometimes before it has cached values."""
    number, query = r.randrange(4), r.tensor(1, 2, 99, 64)
    if r.random() < 0.3:
        SHARED[number] &= masks.Mask()
    plain = torch_attention(query, query, query, is_causal=True)  # which enable() patched
    return [fused_attn.scaled_dot_product_attention(query, query, plain, SHARED[number])]


def packed(r: Draw) -> list[Tensor]:
    lengths, dtype = r.choices(LENGTHS, k=r.randint(1, 5)), r.choice(DTYPES)
    qkv = [r.tensor(sum(lengths), 2, 64, dtype=dtype, grad=True) for _ in "qkv"]
    ends, window = torch.tensor([0, *lengths]).cumsum(0), masks.sliding_window(30)
    longest = max(lengths)
    out = fused_attn.varlen_attention(*qkv, ends, ends, longest, longest, window, 0.1, seed=7)
    return with_gradients(out, qkv)


def decode(r: Draw) -> list[Tensor]:
    lengths, dtype = torch.tensor([r.randint(0, 60) for _ in "ab"]), r.choice(DTYPES)
    pages = torch.tensor(r.sample(range(30), 10)).view(2, 5) if r.random() < 0.5 else None
    shape, outs = (2, 2, 80, 64) if pages is None else (30, 2, 16, 64), []
    caches = [r.tensor(*shape, dtype=dtype) for _ in "kv"]
    for new in r.choices([1, 1, 1, 3], k=4):
        query, *pair = (r.tensor(2, heads, new, 64, dtype=dtype) for heads in (4, 2, 2))
        options = dict(zip(("key", "value"), pair, strict=True), block_table=pages)
        outs += [fused_attn.decode_attention(query, *caches, cache_lengths=lengths, **options)]
        lengths += new
    return outs + caches


def norm(r: Draw) -> list[Tensor]:
    shape, dtype = (r.choice(LENGTHS), r.choice([64, 100, 768])), r.choice(DTYPES)
    inputs = [r.tensor(*size, dtype=dtype, grad=True) for size in (shape, shape[1:], shape)]
    function = r.choice([fused_attn.layer_norm, fused_attn.rms_norm])
    options = {"residual": inputs[2], "dropout_p": 0.1, "seed": 7, "backend": "cpp"}
    return with_gradients(function(inputs[0], shape[1:], inputs[1], **options), inputs)


def raising(r: Draw) -> list[Tensor]:
    """Make calls that raise exceptions, and then one that does not."""
    query = r.tensor(1, 2, 40, 32, grad=True)
    call = functools.partial(fused_attn.scaled_dot_product_attention, query, query, query)
    hook = query.register_hook(lambda grad: {}["planned"])
    for fail in (
        lambda: call(masks.padding([50])),
        lambda: call(masks.from_mask_mod(lambda *positions: {}["planned"])),
        lambda: call().sum().backward(),
    ):
        with contextlib.suppress(ValueError, KeyError):
            fail()
            raise AssertionError("no exception")
    hook.remove()
    return with_gradients(call(masks.causal()), [query])


torch.manual_seed(0)
LAYER = torch.nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True)
ENCODER = torch.nn.TransformerEncoder(LAYER, 2, enable_nested_tensor=False).eval()
fused_attn.swap_modules(ENCODER)


def module(r: Draw) -> list[Tensor]:
    """Infer with a model that all threads share, or train a copy of it."""
    x, lengths = r.tensor(4, r.choice(LENGTHS), 64), torch.tensor(r.choices(LENGTHS, k=4))
    padded = torch.arange(x.shape[1]) >= lengths[:, None]
    if r.random() < 0.5:
        with torch.inference_mode():
            return [ENCODER(x, src_key_padding_mask=padded)]
    model = copy.deepcopy(ENCODER).train()
    model(x, src_key_padding_mask=padded).square().sum().backward()
    torch.optim.AdamW(model.parameters()).step()
    return [*model.parameters()]


@functools.partial(torch.compile, dynamic=True, backend="aot_eager")  # inductor takes minutes
def attend_and_normalize(x: Tensor, weight: Tensor) -> Tensor:
    out = fused_attn.scaled_dot_product_attention(x, x, x, masks.causal(), backend="cpp")
    return fused_attn.rms_norm(out, x.shape[-1:], weight, backend="cpp")


def compiled(r: Draw) -> list[Tensor]:
    grad = r.random() < 0.5
    inputs = [r.tensor(2, 2, r.choice(LENGTHS), 64, grad=grad), r.tensor(64, grad=grad)]
    return with_gradients(attend_and_normalize(*inputs), inputs)


# Kinds whose bits do not depend on the number of threads. Torch's matmuls and graphs do.
OURS = {f.__name__: f for f in (attention, packed, decode, norm, shared_mask, raising)}
KINDS = OURS | {f.__name__: f for f in (eager, module, compiled)}
# torch.compile takes long in a new process, and its lock may be held during a fork.
IN_PROCESSES = [kind for kind in KINDS if kind != "compiled"]


def digest(call: Call, threads: int = 2) -> str:
    """Make a call, and return a hash of the bits of its results; 0 keeps the number of threads."""
    if threads:
        torch.set_num_threads(threads if call[0] in OURS else 2)
    total = hashlib.blake2b(digest_size=8)
    for tensor in KINDS[call[0]](Draw(call[1])):
        total.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()
