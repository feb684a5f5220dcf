"""Fused RMS norms for Hugging Face transformers; by_code.py finds the classes they replace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, dtype

from fused_attn import functional
from fused_attn.nn.norm import Norm


@dataclass(frozen=True)
class Style:
    """Properties in which the RMS norm classes of transformers differ.

    Attributes:
        eps: name of the module attribute that is added to the mean square.
        offset: number added to the weight, in float32.
        out_dtype: function from input dtype and weight dtype to output dtype.
    """

    eps: str
    offset: float
    out_dtype: Callable[[dtype, dtype], dtype]


def _of_input(input: dtype, weight: dtype) -> dtype:
    return input


def _of_half_weight(input: dtype, weight: dtype) -> dtype:
    half = weight in (torch.float16, torch.bfloat16)
    return weight if half else torch.promote_types(input, weight)


# Maps (module under transformers.models, class name) to the style of the class. Each entry also
# covers the classes of other models that have the same code (see by_code.py).
STYLES = {
    ("llama.modeling_llama", "LlamaRMSNorm"): Style("variance_epsilon", 0.0, torch.promote_types),
    ("gemma2.modeling_gemma2", "Gemma2RMSNorm"): Style("eps", 1.0, _of_input),
    ("gpt_oss.modeling_gpt_oss", "GptOssRMSNorm"): Style("variance_epsilon", 0.0, _of_input),
    ("t5.modeling_t5", "T5LayerNorm"): Style("variance_epsilon", 0.0, _of_half_weight),
}


class TransformersNorm(Norm):
    """Base class of the fused RMS norms that `swap_modules` creates, one for each class it finds.

    Outputs are rounded once. The originals of Llama and T5 round twice, before and after the
    multiplication by the weight. float64 inputs are computed in float64, whereas the originals
    convert them to float32.
    """

    style: Style
    weight: Tensor

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalize hidden_states, (*, hidden_size).

        The output has the dtype that the original module would return.
        """
        weight, style = self.weight, self.style
        out_dtype = style.out_dtype(hidden_states.dtype, weight.dtype)
        rows = hidden_states.to(torch.promote_types(hidden_states.dtype, out_dtype))
        if style.offset:
            weight = weight.to(torch.promote_types(weight.dtype, torch.float32)) + style.offset
        out = functional.rms_norm(rows, weight.shape, weight, getattr(self, style.eps))
        return cast(Tensor, out).to(out_dtype)
