"""The choice of the KDA kernel. No machine here has CUDA: the choice is tested, the kernels are not run."""

from __future__ import annotations

import importlib
import importlib.util
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="the training half needs torch (pip install 'twoends[train]')")

from tests.train.models import tiny_architecture  # noqa: E402
from twoends.kernels.built import is_built  # noqa: E402
from twoends.train import kda_choice  # noqa: E402
from twoends.train.conv_native import native_convolution  # noqa: E402
from twoends.train.delta_rule import tiled_kda  # noqa: E402
from twoends.train.kda import KimiDeltaAttention  # noqa: E402
from twoends.train.kda_choice import choose_kda, flash_kernel  # noqa: E402
from twoends.train.kda_native import native_kda  # noqa: E402
from twoends.train.model import KimiK3  # noqa: E402
from twoends.train.native import native_kernels  # noqa: E402
from twoends.train.packing import documents_of_lengths  # noqa: E402


@pytest.mark.skipif(not is_built(), reason="needs the native kernels")
def test_a_processor_runs_native_tiles_and_says_why() -> None:
    choice = choose_kda(torch.device("cpu"))
    assert (choice.name, choice.kernel, choice.convolve) == ("native tiles", native_kda, native_convolution)
    isa = native_kernels().isa
    assert choice.reason == f"the run is on the CPU and the native kernels are built ({isa})"


def test_a_processor_without_native_kernels_runs_tiles_and_says_how_to_get_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kda_choice, "is_built", lambda: False)
    choice = choose_kda(torch.device("cpu"))
    assert (choice.name, choice.kernel) == ("tiles", tiled_kda)
    assert "no C++ compiler at install" in choice.reason


def test_another_device_runs_tiles() -> None:
    choice = choose_kda(torch.device("mps"))
    assert (choice.name, choice.kernel) == ("tiles", tiled_kda)
    assert choice.reason == "flash-linear-attention's kernels need CUDA, this run is on mps"


def test_a_gpu_without_the_package_runs_tiles_and_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    choice = choose_kda(torch.device("cuda"))
    assert choice.name == "tiles"
    assert "pip install flash-linear-attention" in choice.reason


def test_a_gpu_with_the_package_runs_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    package = SimpleNamespace(chunk_kda=lambda **arguments: (arguments["v"] * 2, None))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: package)
    monkeypatch.setattr(importlib, "import_module", lambda name: package)
    choice = choose_kda(torch.device("cuda"))
    x = torch.ones(1, 3, 2, 4)
    assert choice.name == "flash-linear-attention"
    assert torch.equal(choice.kernel(x, x, x, x, x[..., 0], None), x * 2)


def test_documents_reach_the_kernel_as_one_row_with_lengths() -> None:
    def chunk_kda(**given: torch.Tensor) -> tuple[torch.Tensor, None]:
        assert given["cu_seqlens"].tolist() == [0, 2, 6, 9, 12]
        assert given["g"].shape == (1, 12, 2, 4)
        pieces = [
            tiled_kda(*(given[name][:, a:b] for name in ("q", "k", "v", "g", "beta")))
            for a, b in ((0, 2), (2, 6), (6, 9), (9, 12))
        ]
        return torch.cat(pieces, 1), None

    documents = torch.cat([documents_of_lengths(torch.tensor(cut), tokens=6) for cut in ([0, 2, 6], [0, 3])])
    x = [torch.randn(2, 6, 2, 4, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    x[3] = -x[3].abs()
    beta = torch.full((2, 6, 2), 0.5)
    found = flash_kernel(chunk_kda)(*x, beta, documents)  # type: ignore[arg-type]
    torch.testing.assert_close(found, tiled_kda(*x, beta, documents))


def test_a_model_runs_the_kernel_it_is_given() -> None:
    choice = choose_kda(torch.device("cpu"))
    model = KimiK3(tiny_architecture()).use_kda(choice)
    kernels = {m.kernel for m in model.modules() if isinstance(m, KimiDeltaAttention)}
    assert kernels == {choice.kernel}


@pytest.mark.parametrize("lengths", [[1, 4], [0, 5, 3], [0, 9]])
def test_lengths_that_make_no_row_are_refused(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="cu_seqlens"):
        documents_of_lengths(torch.tensor(lengths), tokens=8)
