"""Run the MLA tests of a Megatron-LM checkout against the LAGA layer, on CPU ranks.

    python tests/integrations/megatron/own_tests.py path/to/Megatron-LM --ranks 4

The checkout brings its own Megatron-Core and tests; its training package needs what it imports (six, einops,
requests, triton and others). This file is the command, and at the same time the pytest plugin that the command loads
into every rank. The plugin changes nothing in the checkout. Inside pytest it

- runs Megatron on the CPU with gloo, with layers of this repository standing in for Transformer Engine's;
- puts LAGA's layer where the tests name `MLASelfAttention`, and into every Transformer Engine layer spec;
- takes the default of `attention_dropout` to be 0, since latent attention refuses any other;
- answers with a part of the query where a test asks the layer itself for values, for LAGA has none: what these tests
  assert of values is then true of queries, and what they assert of queries, latents and outputs is asserted of LAGA;
- skips what needs a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest

HERE = Path(__file__).resolve().parent
TESTS = "tests/unit_tests/transformer/test_multi_latent_attention.py"
GPU_ONLY = "a Triton kernel, which needs a GPU"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a Megatron-LM working tree")
    parser.add_argument("--ranks", type=int, default=1, help="processes (default 1); some tests need 4")
    options, pytest_arguments = parser.parse_known_args()
    checkout = options.checkout.resolve()
    if not (checkout / TESTS).is_file():
        parser.error(f"{checkout} has no {TESTS}")
    # The checkout's `tests` package must be the one that is imported, so this repository stays off the path.
    path = os.pathsep.join([str(checkout), str(HERE), os.environ.get("PYTHONPATH", "")])
    launch = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={options.ranks}"]
    launch += ["--local-ranks-filter=0", "--no-python"]
    run = [sys.executable, "-m", "pytest", "-p", Path(__file__).stem, "-o", "addopts=", "-q", TESTS, *pytest_arguments]
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MLA_OWN_TESTS": "1"}
    return subprocess.run(launch + run, cwd=checkout, env=environment, check=False).returncode


def load(name: str, file: Path) -> ModuleType:
    """A module of this repository, under a name of its own."""
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def without_downloads() -> None:
    """The checkout's conftest fetches data sets that these tests do not read."""
    name = "tests.test_utils.python_scripts.download_unit_tests_dataset"
    sys.modules[name] = mock.MagicMock()


def use_gloo() -> None:
    import torch
    import torch.distributed as dist

    start = dist.init_process_group
    dist.init_process_group = lambda *_, backend=None, **arguments: start("gloo", **arguments)
    torch.cuda.device_count = lambda: int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device = lambda device: None
    torch.cuda.is_available = lambda: False


def skip_without_enough_ranks() -> None:
    from megatron.core import parallel_state

    make = parallel_state.initialize_model_parallel

    @functools.wraps(make)
    def make_or_skip(*arguments: Any, **options: Any) -> None:
        try:
            make(*arguments, **options)
        except RuntimeError as error:
            if "not divisible" in str(error):
                pytest.skip(f"needs more ranks: {error}")
            raise

    parallel_state.initialize_model_parallel = make_or_skip


def stand_in_for_transformer_engine() -> None:
    stand_ins = load("te_stand_ins", HERE / "te_stand_ins.py")
    plain = load("plain_attention", HERE / "plain_attention.py")
    from megatron.core import utils
    from megatron.core.extensions import transformer_engine as wrappers
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer import multi_latent_attention as mla
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    layers = {
        "TELinear": stand_ins.DuplicatedLinear,
        "TEColumnParallelLinear": ColumnParallelLinear,
        "TELayerNormColumnParallelLinear": stand_ins.NormColumnParallelLinear,
        "TERowParallelLinear": RowParallelLinear,
        "TENorm": WrappedTorchNorm,
        "TEDotProductAttention": plain.PlainAttention,
    }
    for name, layer in layers.items():
        setattr(wrappers, name, layer)
        if hasattr(mla, name):
            setattr(mla, name, layer)
    from megatron.core.extensions import transformer_engine_spec_provider as provider
    from megatron.core.models.gpt import gpt_layer_specs

    gpt_layer_specs.TESpecProvider, gpt_layer_specs.HAVE_TE = provider.TESpecProvider, True
    engine = ModuleType("transformer_engine")
    engine.__version__ = "2.9.0"  # type: ignore[attr-defined]
    sys.modules["transformer_engine"] = engine
    utils.is_te_min_version.__globals__["get_te_version"] = lambda: utils.PkgVersion(engine.__version__)


def use_laga() -> None:
    """Put a LAGA layer where the tests look for the stock one."""
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer import multi_latent_attention as mla
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    from laga_attn.integrations.megatron import layer, with_laga
    from laga_attn.integrations.megatron.core_attention import LatentCoreAttention

    class CoreForTests(LatentCoreAttention):
        """Takes back what a test got from the layer, values included."""

        def forward(self, query: Any, key: Any, value: Any, *arguments: Any, **options: Any) -> Any:
            return super().forward(query, key, None, *arguments, **options)

    class LayerForTests(layer.LatentMLASelfAttention):
        """Takes the stock submodules, and has values for everyone but itself."""

        asks_itself = False

        def __init__(self, config: Any, submodules: Any, *arguments: Any, **options: Any) -> None:
            stock = ModuleSpec(module=layer.MLASelfAttention, submodules=submodules)
            submodules = with_laga(stock).submodules
            submodules.core_attention.module = CoreForTests
            super().__init__(config, submodules, *arguments, **options)

        def forward(self, *arguments: Any, **options: Any) -> Any:
            with mock.patch.object(self, "asks_itself", True):
                return super().forward(*arguments, **options)

        def get_query_key_value_tensors(self, *arguments: Any, **options: Any) -> Any:
            query, key, value, *compressed = super().get_query_key_value_tensors(*arguments, **options)
            if not self.asks_itself:
                value = query[..., : self.config.v_head_dim].contiguous()
            return query, key, value, *compressed

        def _run_core_attention(self, query: Any, key: Any, value: Any, *arguments: Any, **options: Any) -> Any:
            # From 0.18 on tests call this; with values it would pad them, and cut the output.
            return super()._run_core_attention(query, key, None, *arguments, **options)

    make_spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec

    @functools.wraps(make_spec)
    def spec_with_laga(*arguments: Any, **options: Any) -> Any:
        spec = make_spec(*arguments, **options)
        spec.submodules.self_attention.module = LayerForTests
        return spec

    gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec = spec_with_laga
    if hasattr(mla, "FusedMLASelfAttention"):
        names = {"__doc__": "The same for the layer with one down-projection."}
        mla.FusedMLASelfAttention = type("FusedForTests", (LayerForTests, mla.FusedMLASelfAttention), names)
    mla.MLASelfAttention = LayerForTests
    initialise = MLATransformerConfig.__init__
    assert any(field.name == "attention_dropout" for field in dataclasses.fields(MLATransformerConfig))

    def without_dropout(self: Any, *arguments: Any, **options: Any) -> None:
        initialise(self, *arguments, **{"attention_dropout": 0.0, **options})

    MLATransformerConfig.__init__ = without_dropout


if "MLA_OWN_TESTS" in os.environ and __name__ != "__main__":
    cpu = load("megatron_cpu", HERE.parents[1] / "megatron_cpu.py")
    use_gloo()
    skip_without_enough_ranks()
    stand_in_for_transformer_engine()
    use_laga()
    without_downloads()
    context = cpu.megatron_on_cpu()

    def pytest_configure() -> None:
        context.__enter__()

    def pytest_unconfigure() -> None:
        context.__exit__(None, None, None)

    def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
        for item in items:
            parameters = getattr(item, "callspec", None)
            fused = parameters is not None and parameters.params.get("apply_rope_fusion")
            if fused or "ropefusion" in item.nodeid.replace("_", "").lower():
                item.add_marker(pytest.mark.skip(reason=GPU_ONLY))


if __name__ == "__main__":
    sys.exit(main())
