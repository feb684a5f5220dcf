"""One tiny call per pass and backend: the first tests to run on a new machine."""

from __future__ import annotations

import functools

import pytest
import torch
from devices import DEVICE
from judging import require
from judging_checks import OWN, run, runnable

from fused_attn.backends import Backend, get_backend
from fused_attn.tools import contract
from fused_attn.tools.checks import AttentionCheck, DecodeCheck, NormCheck
from fused_attn.tools.verify import device_of

# All kernels support this dtype and head_dim. Similar calls keep the number of compilations low.
attention = functools.partial(
    AttentionCheck, shape="2,2,48,80,64", mask="causal", dtype="bfloat16", gradients=False
)
norm = functools.partial(NormCheck, rows=16, columns=64, dtype="bfloat16", gradients=False)
CHECKS = {
    "forward": attention(),
    "unmasked": attention(mask="none"),
    "lse": attention(result="lse"),
    "backward": attention(gradients=True),
    "few_queries": attention(shape="2,2,1,80,64", mask="padding"),
    "decode": DecodeCheck(shape="2,2,1,80,64", dtype="bfloat16"),
    "weights": attention(result="weights"),
    "bias_gradient": attention(bias="learned", gradients=True),
    "softcap": attention(softcap=5.0),
    "dropout": attention(dropout_p=0.3),
    "packed": attention(packed=True),
    "layer_norm_forward": norm(residual=True),
    "layer_norm_backward": norm(residual=True, gradients=True),
    "rms_norm_forward": norm(rms=True),
    "rms_norm_backward": norm(rms=True, gradients=True),
    "norm_dropout": norm(dropout_p=0.3),
}
BACKENDS = runnable([*([] if DEVICE.type == "cuda" else ["cpp"]), "sdpa", "eager", *OWN])
ACTIVATES = [b for b in BACKENDS if type(get_backend(b)).activation is not Backend.activation]


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_pass(backend, name):
    run(backend, CHECKS[name])


@pytest.mark.parametrize("backend", ACTIVATES)
def test_activation(backend):
    """Outputs and gradients of gelu(input + bias) are within the limits of the backend."""
    device = DEVICE if backend == "eager" else device_of(backend)
    input, grad_out = torch.randn(2, 64, 96, device=device).bfloat16().unbind()
    bias = torch.randn(96, device=device).bfloat16()
    given = "gelu", 0.0, None
    reference = get_backend("eager").activation

    for name, count in (("out", 2), ("grad", 3)):
        operands = (input, bias, grad_out)[:count]
        doubles = [t.double() for t in operands]
        got, eager, truth = (
            function(*tensors[:2], *given, *tensors[2:])
            for function, tensors in (
                (get_backend(backend).activation, operands),
                (reference, operands),
                (reference, doubles),
            )
        )
        finding = contract.judge(name, got, truth, eager, gradient=name == "grad")
        require([finding], backend)
