"""When cuDNN's attention can be called, and what is said where it cannot."""

import types

import jax
import jax.numpy as jnp
import pytest

from eqxcallback.xla.calls import _cudnn


pytestmark = pytest.mark.any_jax_version

FUSED = _cudnn._fused()


@pytest.fixture
def hopper(monkeypatch):
    """A process with such a GPU, and with the cuDNN that a test asks for."""
    monkeypatch.delenv("EQXCALLBACK_CUDA_ARCH", raising=False)
    monkeypatch.setattr(_cudnn, "compute_capabilities", lambda: [90, 90])
    monkeypatch.setattr(FUSED, "check_cudnn_version", lambda: 91900)
    _cudnn._why_changed.cache_clear()
    yield monkeypatch
    _cudnn._why_changed.cache_clear()


def test_here(hopper):
    assert _cudnn.why_no_cudnn() is None


@pytest.mark.parametrize(
    ("capabilities", "version", "reason"),
    [
        ([90], 90200, None),
        ([80, 90], 91900, None),
        ([120], 91900, None),
        ([], 91900, "this process has no GPU"),
        ([90, 75], 91900, "the compute capability has to be 8.0 or more; it is 7.5"),
        ([90], 90105, "cuDNN has to be 9.2.0 or newer; it is 9.1.5"),
        ([90, 103], 91002, "cuDNN has to be 9.11.0 or newer; it is 9.10.2"),
        ([103], 91100, None),
    ],
)
def test_of_devices(capabilities, version, reason, hopper):
    hopper.setattr(_cudnn, "compute_capabilities", lambda: capabilities)
    hopper.setattr(FUSED, "check_cudnn_version", lambda: version)
    assert _cudnn.why_no_cudnn() == reason


def test_of_a_described_gpu(hopper):
    hopper.setenv("EQXCALLBACK_CUDA_ARCH", "sm_90")
    assert _cudnn.why_no_cudnn() == "EQXCALLBACK_CUDA_ARCH describes the GPU, and not whether it has cuDNN"


def test_without_the_library(hopper):
    def missing():
        raise RuntimeError("cuDNN is not detected.")

    hopper.setattr(FUSED, "check_cudnn_version", missing)
    assert _cudnn.why_no_cudnn() == "JAX does not find cuDNN (cuDNN is not detected.)"


def test_of_another_jax(hopper):
    """Its private names may change, and nothing else than this kernel depends on them."""
    hopper.setattr(FUSED, "_dot_product_attention_bwd_impl", lambda query, key: None)
    reason = "JAX's _dot_product_attention_bwd_impl has other parameters than are known: query, key"
    assert _cudnn.why_no_cudnn() == reason


@pytest.mark.parametrize("name", [*_cudnn._PARAMETERS, "MaskType", "AttentionLayout"])
def test_of_a_jax_without_a_name(name, hopper):
    hopper.delattr(FUSED, name)
    reason = _cudnn.why_no_cudnn()
    assert reason is not None
    assert reason.startswith("JAX has it elsewhere (")
    assert name in reason


def test_of_a_jax_without_the_module(hopper):
    hopper.setattr(_cudnn, "_MODULE", "jax._src.cudnn.somewhere_else")
    assert _cudnn.why_no_cudnn() == "JAX has it elsewhere (No module named 'jax._src.cudnn.somewhere_else')"


def test_of_a_jax_with_other_masks(hopper):
    hopper.setattr(FUSED, "MaskType", types.SimpleNamespace(NO_MASK=0))
    assert "CAUSAL" in (_cudnn.why_no_cudnn() or "")


def test_types():
    """The log-sum-exp is in f32, and heads are before queries."""
    q, kv = jax.ShapeDtypeStruct((2, 40, 6, 64), jnp.bfloat16), jax.ShapeDtypeStruct((2, 50, 3, 64), jnp.bfloat16)
    options = {"scale": 0.1, "causal": False, "window": None}
    results = jax.eval_shape(lambda *args: _cudnn.cudnn_attention(*args, **options), q, kv, kv)
    assert [(x.shape, x.dtype) for x in results] == [(q.shape, q.dtype), ((2, 6, 40), jnp.float32)]
    out, lse = results
    gradients = jax.eval_shape(
        lambda *args: _cudnn.cudnn_attention_backward(*args, **options), q, kv, kv, out, lse, out
    )
    assert [(x.shape, x.dtype) for x in gradients] == [(x.shape, x.dtype) for x in (q, kv, kv)]
