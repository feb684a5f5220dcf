"""The package exported as a Hugging Face Hub kernel, and loaded from the exported folder."""

import sys

import pytest
import torch
from commands import ROOT, output_of
from nn_helpers import assert_equal_in_float64, perturb, randn, run
from torch import nn

import fused_attn

sys.path.insert(0, str(ROOT / "hub"))
pytest.importorskip("kernels", reason="reason: needs Hugging Face's kernels")
import export
import kernels
from kernels._rust import Digest, DigestAlgorithm, Metadata
from kernels.validate import AllValidator, default_metadata_validators
from kernels.variants import NoarchVariant, get_variants_local

ALONE = """
import sys
from pathlib import Path
sys.modules["fused_attn"] = None  # importing it would fail
import torch
from kernels import get_local_kernel

kernel = get_local_kernel(Path(sys.argv[1]), backend="cpu")
import importlib, pkgutil
LEFT_OUT = ("_cuda", "__main__")
for found in pkgutil.walk_packages(kernel.__path__, kernel.__name__ + "."):
    if "triton." not in found.name and not found.name.endswith(LEFT_OUT):
        importlib.import_module(found.name)
assert kernel.available_backends()[0] == "cpp"
x = torch.randn(2, 4, 9, 8, requires_grad=True)
mask = kernel.masks.causal() & kernel.masks.padding([9, 4])
compiled = torch.compile(kernel.scaled_dot_product_attention, backend="aot_eager", fullgraph=True)
out = compiled(x, x, x, mask)
out.sum().backward()
assert torch.equal(out, kernel.scaled_dot_product_attention(x, x, x, mask))
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """Export a Hub kernel from the source tree, instead of from wheels, and return its folder."""
    out = tmp_path_factory.mktemp("hub") / "fused-attn"
    export.export([ROOT], out)
    return out


@pytest.fixture(scope="module")
def kernel(repository):
    return kernels.get_local_kernel(repository, backend="cpu")


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_hub_accepts_metadata_and_variants(repository, backend):
    variant = repository / "build" / f"torch-{backend}"
    metadata = Metadata.read_from_file(variant / "metadata.json")
    assert (str(metadata.name), metadata.version, metadata.license) == ("fused-attn", 1, "MIT")
    assert str(metadata.backend.backend_type).lower() == backend
    metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))
    AllValidator(default_metadata_validators()).validate_metadata(
        metadata=metadata, variant=variant.name
    )
    variants = get_variants_local(repository / "build")
    assert all(isinstance(variant, NoarchVariant) for variant in variants)
    assert sorted(v.variant_str for v in variants) == ["torch-cpu", "torch-cuda"]


@pytest.mark.thorough
def test_needs_no_installed_package(repository):
    output_of(sys.executable, "-c", ALONE, repository)


def test_beside_the_installed_package(kernel):
    query, key, value = (torch.randn(2, 4, 9, 8) for _ in range(3))
    mask = kernel.masks.causal() & kernel.masks.padding([9, 4])
    ours = fused_attn.masks.causal() & fused_attn.masks.padding([9, 4])
    theirs = kernel.scaled_dot_product_attention(query, key, value, mask)
    assert torch.equal(
        theirs, fused_attn.scaled_dot_product_attention(query, key, value, attn_mask=ours)
    )
    assert kernel.Mask is not fused_attn.Mask


def test_swaps_modules(kernel):
    layer = perturb(nn.TransformerEncoderLayer(16, 2, 24, 0.0, batch_first=True).double())
    inputs = (randn(2, 5, 16),)
    expected = run(layer, inputs)
    report = kernel.swap_modules(layer)
    assert report.swapped and all("fused_attn.nn." in str(entry) for entry in report.swapped)
    assert_equal_in_float64(run(layer, inputs), expected)


class LlamaNorm(nn.Module):
    """RMS norm with the attributes of transformers' LlamaRMSNorm."""

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        return nn.functional.rms_norm(
            hidden_states, self.weight.shape, self.weight, self.variance_epsilon
        )


@pytest.mark.parametrize(("base", "name"), [(LlamaNorm, "RMSNorm"), (nn.LayerNorm, "LayerNorm")])
def test_kernelize(repository, kernel, base, name):
    cls = type(base.__name__, (base,), {"forward": base.forward})  # kernelize modifies it
    kernels.replace_kernel_forward_from_hub(cls, name)
    model = perturb(nn.Sequential(cls(16), nn.Linear(16, 16)).double())
    inputs = (randn(3, 16),)
    expected = run(model, inputs)
    layer = kernels.LocalLayerRepository(repository, layer_name=name)
    with kernels.use_kernel_mapping({name: {"cpu": layer}}):
        kernels.kernelize(model, mode=kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE)
    assert model[0].forward.__func__ is getattr(kernel.layers, name).forward
    assert_equal_in_float64(run(model, inputs), expected)


def test_wheels_of_two_versions_are_refused(repository, tmp_path):
    package = tmp_path / "other" / "fused_attn"
    package.mkdir(parents=True)
    (package / "decode.py").write_text("")
    with pytest.raises(SystemExit, match="differs between the wheels"):
        export.export([ROOT, tmp_path / "other"], tmp_path / "out")


PUBLISHED = "organization/fused-attn"  # the only repository name that the fake get_kernel accepts


@pytest.fixture
def published(monkeypatch, repository):
    """Make transformers load the exported folder instead of downloading a kernel from the Hub."""
    hub_kernels = pytest.importorskip("transformers.integrations.hub_kernels")

    def get_kernel(name, revision, version, allow_all_kernels):
        assert (name, revision, version) == (PUBLISHED, None, export.VERSION)
        return kernels.get_local_kernel(repository, backend="cpu")

    monkeypatch.setattr(hub_kernels, "get_kernel", get_kernel)
    # transformers 5.24 requires kernels 0.18.2, which is not needed to load a local folder.
    monkeypatch.setattr(hub_kernels, "is_kernels_available", lambda: True)


@pytest.mark.parametrize("name", ["Bert", "Llama", "Mistral", "Gemma2", "GptOss"])
def test_transformers_use_the_repository_as_attention(published, kernel, name):
    """A model whose attn_implementation is the name of the Hub repository agrees with eager.

    The inputs are padded. The last three models have sliding windows, Gemma2 also has softcap,
    and GptOss has sinks.
    """
    from hf_families import BY_NAME

    family = BY_NAME[name]
    model, inputs = family.model("eager"), family.inputs()
    real = inputs["attention_mask"].bool()
    with torch.no_grad():
        expected = model(**inputs)[family.outputs[0]][real]
        model.set_attn_implementation(PUBLISHED, allow_all_kernels=True)
        with kernel.stats() as counts:
            out = model(**inputs)[family.outputs[0]][real]
    assert counts.fused == 2
    torch.testing.assert_close(out, expected)
    if family.generates:
        mask = torch.ones_like(inputs["attention_mask"])
        mask[1, :4] = 0  # generate expects left padding
        options = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False}
        tokens = model.generate(inputs["input_ids"], **options)
        model.set_attn_implementation("eager")
        assert torch.equal(tokens, model.generate(inputs["input_ids"], **options))
